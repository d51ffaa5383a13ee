"""What fully_shard makes of a module: placements, data types, state dictionaries."""

# mypy: allow-subclassing-any, allow-untyped-decorators

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    FSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.testing._internal.common_utils import instantiate_parametrized_tests, parametrize

from benchmarks.base import GroupTest
from benchmarks.models import backward, batch, network, train


def sharded(model: Any, **options: Any) -> Any:
    """Each linear layer in a group of its own, and what is left in the root's."""
    for module in model.modules():
        if isinstance(module, nn.Linear):
            fully_shard(module, **options)
    return fully_shard(model, **options)


class ShardedModuleTest(GroupTest):
    def test_parameters_are_sharded(self) -> None:
        with self.group():
            model, plain = sharded(network()), network()
            for got, whole in zip(model.parameters(), plain.parameters(), strict=True):
                self.assertIsInstance(got, DTensor)
                self.assertEqual(got.placements, (Shard(0),))
                self.assertEqual(got.shape, whole.shape)
                self.assertEqual(got.full_tensor(), whole)
            # Six rows and three, on four ranks.
            self.assertEqual(model[2].weight.to_local().shape[0], [2, 2, 2, 0][self.rank])
            self.assertEqual(model[4].weight.to_local().shape[0], [1, 1, 1, 0][self.rank])

    def test_placement_function(self) -> None:
        def columns(parameter: Any) -> Any:
            return Shard(1) if parameter.ndim == 2 else None

        with self.group():
            model, plain = fully_shard(network()[:3], shard_placement_fn=columns), network()[:3]
            self.assertEqual(model[0].weight.to_local(), plain[0].weight.chunk(4, 1)[self.rank])
            self.assertEqual(model[0].bias.to_local(), plain[0].bias.chunk(4)[self.rank])
            train(model, [batch().chunk(4)[self.rank]])
            train(plain, [batch()])
            self.assertEqual(model[2].weight.full_tensor(), plain[2].weight)

    @parametrize("async_op", [False, True])
    def test_unshard_and_reshard(self, async_op: bool) -> None:
        with self.group():
            layer = sharded(network())[0]
            handle = layer.unshard(async_op=async_op)
            if async_op:
                handle.wait()
            else:
                self.assertIsNone(handle)
            self.assertEqual(type(layer.weight), nn.Parameter)
            self.assertEqual(layer.weight, network()[0].weight)
            layer.reshard()
            self.assertIsInstance(layer.weight, DTensor)

    def test_root_stays_unsharded_after_forward(self) -> None:
        with self.group():
            model = network()
            fully_shard(model[0])
            fully_shard(model)
            model(batch())
            self.assertIsInstance(model[0].weight, DTensor)
            self.assertNotIsInstance(model[2].weight, DTensor)
            model.set_reshard_after_forward(False)
            model(batch())
            self.assertNotIsInstance(model[0].weight, DTensor)

    def test_classes(self) -> None:
        with self.group():
            model = network()
            names = list(model.state_dict())
            sharded(model)
            self.assertIsInstance(model, FSDPModule)
            self.assertIsInstance(model, nn.Sequential)
            self.assertEqual(type(model[0]).__name__, "FSDPLinear")
            self.assertIs(type(model[0]), type(model[2]))
            self.assertIs(type(model[1]), nn.ReLU)
            self.assertEqual(list(model.state_dict()), names)

    def test_no_copies_and_no_second_time(self) -> None:
        with self.group():
            model = fully_shard(network())
            with self.assertRaisesRegex(AssertionError, "deepcopy"):
                copy.deepcopy(model)
            with self.assertRaises(AssertionError):
                fully_shard(model)

    def test_ignored_parameters(self) -> None:
        with self.group():
            model, plain = network(), network()
            fully_shard(model, ignored_params=set(model[2].parameters()))
            self.assertIs(type(model[2].weight), nn.Parameter)
            self.assertIsInstance(model[0].weight, DTensor)
            mine = batch().chunk(self.world_size)[self.rank]
            backward(model, mine)
            backward(plain, mine)
            self.assertEqual(model[2].weight.grad, plain[2].weight.grad)

    def test_buffers_are_whole(self) -> None:
        with self.group():
            plain = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))
            model = fully_shard(copy.deepcopy(plain))
            mine = batch().chunk(self.world_size)[self.rank]
            for whole in (model, plain):
                whole(mine)
            self.assertIs(type(model[1].running_mean), torch.Tensor)
            self.assertEqual(dict(model[1].named_buffers()), dict(plain[1].named_buffers()))

    def test_another_method_than_forward(self) -> None:
        class Scaled(nn.Linear):
            def scale(self, rows: Any) -> Any:
                return self(rows) * self.weight.sum()

        with self.group():
            torch.manual_seed(0)
            model = Scaled(8, 4)
            expected = model.scale(batch())
            fully_shard(model)
            register_fsdp_forward_method(model, "scale")
            self.assertEqual(model.scale(batch()), expected)
            self.assertIsInstance(model.weight, DTensor)

    def test_all_reduce_hook(self) -> None:
        with self.group():
            mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
            model, plain = fully_shard(network(), mesh=mesh["shard"]), network()
            model.set_all_reduce_hook(lambda gradient: gradient.mul_(3))
            mine = batch().chunk(2)[mesh["shard"].get_local_rank()]
            backward(model, mine)
            backward(plain, batch())
            for got, wanted in zip(model.parameters(), plain.parameters(), strict=True):
                self.assertEqual(got.grad.full_tensor(), wanted.grad * 3)

    def test_from_meta_device(self) -> None:
        with self.group():
            with torch.device("meta"):
                model = network()
            sharded(model)
            self.assertTrue(all(p.is_meta for p in model.parameters()))
            model.to_empty(device="cpu")
            plain = network()
            with torch.no_grad():
                for got, whole in zip(model.parameters(), plain.parameters(), strict=True):
                    got.copy_(distribute_tensor(whole, got.device_mesh, got.placements))
            train(model, [batch().chunk(self.world_size)[self.rank]])
            train(plain, [batch()])
            for got, wanted in zip(model.parameters(), plain.parameters(), strict=True):
                self.assertEqual(got.full_tensor(), wanted)


class MixedPrecisionTest(GroupTest):
    def test_gradients(self) -> None:
        with self.group():
            policy = MixedPrecisionPolicy(torch.bfloat16, reduce_dtype=torch.float32)
            model, low = sharded(network(), mp_policy=policy), network().to(torch.bfloat16)
            parts = batch().chunk(self.world_size)
            self.assertEqual(backward(model, parts[self.rank]).dtype, torch.bfloat16)

            sums = [torch.zeros_like(p, dtype=torch.float32) for p in low.parameters()]
            for part in parts:
                low.zero_grad()
                backward(low, part.to(torch.bfloat16))
                for total, parameter in zip(sums, low.parameters(), strict=True):
                    total += parameter.grad
            for parameter, total in zip(model.parameters(), sums, strict=True):
                self.assertEqual(parameter.dtype, torch.float32)
                self.assertEqual(parameter.grad.full_tensor(), total / self.world_size)

    @parametrize("output_dtype", [torch.float32, torch.float64])
    def test_output(self, output_dtype: torch.dtype) -> None:
        with self.group():
            policy = MixedPrecisionPolicy(torch.bfloat16, output_dtype=output_dtype)
            model, low = fully_shard(network(), mp_policy=policy), network().to(torch.bfloat16)
            expected = low(batch().to(torch.bfloat16)).to(output_dtype)
            self.assertEqual(model(batch()), expected)

    def test_inputs_are_left_alone(self) -> None:
        with self.group():
            policy = MixedPrecisionPolicy(torch.bfloat16, cast_forward_inputs=False)
            model = fully_shard(network(), mp_policy=policy)
            with self.assertRaisesRegex(RuntimeError, "dtype"):
                model(batch())
            self.assertEqual(model(batch().to(torch.bfloat16)).dtype, torch.bfloat16)


class ShardedStateTest(GroupTest):
    def trained(self, seed: int = 0) -> tuple[Any, Any]:
        """A sharded network and its optimizer, after two steps that were alike on every rank."""
        model = sharded(network(seed))
        return model, train(model, [batch(0), batch(1)], torch.optim.Adam)

    def plain(self) -> tuple[Any, Any]:
        """The same, on one process."""
        model = network()
        return model, train(model, [batch(0), batch(1)], torch.optim.Adam)

    def assert_plain(self, model: Any) -> None:
        for got, wanted in zip(model.parameters(), self.plain()[0].parameters(), strict=True):
            self.assertEqual(got.full_tensor(), wanted)

    def test_state_is_of_shards(self) -> None:
        with self.group():
            state, expected = (made.state_dict() for made in (self.trained()[0], self.plain()[0]))
            self.assertEqual(list(state), list(expected))
            for name, whole in expected.items():
                self.assertEqual(state[name].full_tensor(), whole)

    @parametrize("assign", [False, True])
    def test_state_is_loaded(self, assign: bool) -> None:
        with self.group():
            other, _ = self.trained(seed=1)
            other.load_state_dict(self.trained()[0].state_dict(), assign=assign)
            self.assert_plain(other)

    def test_optimizer_state_is_of_shards(self) -> None:
        with self.group():
            states = [made.state_dict()["state"] for made in (self.trained()[1], self.plain()[1])]
            for got, wanted in zip(*(state.values() for state in states), strict=True):
                self.assertEqual(got["exp_avg"].full_tensor(), wanted["exp_avg"])
                self.assertEqual(got["exp_avg_sq"].full_tensor(), wanted["exp_avg_sq"])
                self.assertEqual(got["step"], wanted["step"])

    @parametrize("cpu_offload", [False, True])
    def test_full_state(self, cpu_offload: bool) -> None:
        with self.group():
            options = StateDictOptions(full_state_dict=True, cpu_offload=cpu_offload)
            state = get_model_state_dict(self.trained()[0], options=options)
            expected = dict(self.plain()[0].state_dict())
            self.assertEqual(state, {} if cpu_offload and self.rank != 0 else expected)

    @parametrize("broadcast", [False, True])
    def test_full_state_is_loaded(self, broadcast: bool) -> None:
        with self.group():
            other, _ = self.trained(seed=1)
            state = self.plain()[0].state_dict() if self.rank == 0 or not broadcast else {}
            options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=broadcast)
            set_model_state_dict(other, state, options=options)
            self.assert_plain(other)

    def test_full_optimizer_state_comes_and_goes(self) -> None:
        with self.group():
            options = StateDictOptions(full_state_dict=True)
            state = get_optimizer_state_dict(*self.trained(), options=options)
            expected = self.plain()[1].state_dict()["state"]
            for at, (name, _) in enumerate(network().named_parameters()):
                self.assertEqual(state["state"][name], expected[at])

            model, optimizer = self.trained(seed=1)
            set_optimizer_state_dict(model, optimizer, state, options=options)
            loaded = optimizer.state_dict()["state"]
            for at, wanted in expected.items():
                self.assertEqual(loaded[at]["exp_avg"].full_tensor(), wanted["exp_avg"])


instantiate_parametrized_tests(ShardedModuleTest)
instantiate_parametrized_tests(MixedPrecisionTest)
instantiate_parametrized_tests(ShardedStateTest)
