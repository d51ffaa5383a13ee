"""Training with fully_shard, against the same training on one process."""

# mypy: allow-subclassing-any, allow-untyped-decorators

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.utils import clip_grad_norm_
from torch.testing._internal.common_utils import (
    instantiate_parametrized_tests,
    parametrize,
    subtest,
)

from benchmarks.models import TrainingTest, backward, batch, network, train


def sharded(model: Any, **options: Any) -> Any:
    """Each linear layer in a group of its own, and what is left in the root's."""
    for module in model.modules():
        if isinstance(module, nn.Linear):
            fully_shard(module, **options)
    return fully_shard(model, **options)


class Tied(nn.Module):
    """Looks words up, and scores them, with one matrix."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.Embedding(10, 8)
        self.scores = nn.Linear(8, 10, bias=False)
        self.scores.weight = self.words.weight

    def forward(self, words: Any) -> Any:
        return self.scores(self.words(words))


class ShardedTrainingTest(TrainingTest):
    @parametrize("reshard_after_forward", [True, False, 2])
    def test_reshard_after_forward(self, reshard_after_forward: bool | int) -> None:
        with self.group():
            model = sharded(network(), reshard_after_forward=reshard_after_forward)
            self.train_both(model, network())

    @parametrize(
        "kind", [subtest(getattr(torch.optim, name), name) for name in ("Adam", "AdamW", "Adagrad")]
    )
    def test_optimizers(self, kind: Any) -> None:
        with self.group():
            self.train_both(sharded(network()), network(), kind)

    def test_root_alone(self) -> None:
        with self.group():
            self.train_both(fully_shard(network()), network())

    def test_list_of_modules_is_one_group(self) -> None:
        with self.group():
            model = network()
            fully_shard([model[0], model[2]])
            fully_shard(model)
            model[0].unshard()
            self.assertNotIsInstance(model[2].weight, DTensor)
            self.assertIsInstance(model[4].weight, DTensor)
            model[0].reshard()
            self.train_both(model, network())

    def test_activation_checkpoint(self) -> None:
        with self.group():
            model = network()
            for at in (0, 2):
                model[at] = checkpoint_wrapper(model[at])
            self.train_both(sharded(model), network())

    def test_prefetching(self) -> None:
        with self.group():
            model = sharded(network())
            first, second, third = model[0], model[2], model[4]
            first.set_modules_to_forward_prefetch([second, third])
            third.set_modules_to_backward_prefetch([second, first])
            self.train_both(model, network())

    def test_accumulates_without_synchronization(self) -> None:
        with self.group():
            model, reference = sharded(network()), network()
            for seed in range(3):
                model.set_requires_gradient_sync(seed == 2)
                backward(model, self.mine(batch(seed)))
                if seed < 2:
                    self.assertTrue(all(p.grad is None for p in model.parameters()))
                backward(reference, batch(seed))
            self.assert_same(model, reference, gradients=True)

    def test_accumulates_with_synchronization(self) -> None:
        with self.group():
            model, reference = sharded(network()), network()
            for seed in range(3):
                backward(model, self.mine(batch(seed)))
                backward(reference, batch(seed))
                self.assert_same(model, reference, gradients=True)

    def test_stays_unsharded_between_accumulated_steps(self) -> None:
        with self.group():
            model, reference = sharded(network()), network()
            model.set_requires_gradient_sync(False)
            model.set_reshard_after_backward(False)
            backward(model, self.mine(batch(0)))
            self.assertNotIsInstance(model[0].weight, DTensor)
            model.set_requires_gradient_sync(True)
            model.set_reshard_after_backward(True)
            backward(model, self.mine(batch(1)))
            for seed in range(2):
                backward(reference, batch(seed))
            self.assert_same(model, reference, gradients=True)

    @parametrize("norm", [1.0, 2.0, 3.0])
    def test_clip_grad_norm(self, norm: float) -> None:
        with self.group():
            model, reference = sharded(network()), network()
            backward(model, self.mine(batch()))
            backward(reference, batch())
            total = clip_grad_norm_(model.parameters(), 0.05, norm)
            expected = clip_grad_norm_(reference.parameters(), 0.05, norm)
            self.assertGreater(expected.item(), 0.05)
            self.assertEqual(total.full_tensor(), expected)
            self.assert_same(model, reference, gradients=True)

    def test_divide_factor(self) -> None:
        with self.group():
            model, reference = sharded(network()), network()
            for module in (model[0], model[2], model[4]):
                module.set_force_sum_reduction_for_comms(True)
                module.set_gradient_divide_factor(1.0)
            backward(model, self.mine(batch()))
            (reference(batch()).square().mean() * self.world_size).backward()
            self.assert_same(model, reference, gradients=True)

    def test_frozen_parameters(self) -> None:
        with self.group():
            model, reference = network(), network()
            for whole in (model, reference):
                whole[0].requires_grad_(False)
                whole[2].bias.requires_grad_(False)
            model = sharded(model)
            self.train_both(model, reference)
            self.assertEqual(model[0].weight.full_tensor(), network()[0].weight)
            self.assertIsNone(model[0].weight.grad)
            self.assertIsNone(model[2].bias.grad)
            self.assertIsNotNone(model[2].weight.grad)

    def test_tied_weights(self) -> None:
        with self.group():
            model, reference = fully_shard(Tied()), Tied()
            words = torch.arange(8) % 10
            for _ in range(2):
                train(model, [self.mine(words)])
                train(reference, [words])
            self.assertIs(model.words.weight, model.scores.weight)
            self.assert_same(model, reference)

    def test_two_forwards_before_backward(self) -> None:
        with self.group():
            model, reference = sharded(network()), network()
            for whole, part in ((model, self.mine), (reference, lambda rows: rows)):
                losses = [whole(part(batch(seed))).square().mean() for seed in range(2)]
                (losses[0] + 2 * losses[1]).backward()
            self.assert_same(model, reference, gradients=True)

    def test_evaluation_leaves_no_trace(self) -> None:
        with self.group():
            model, reference = sharded(network()), network()
            with torch.no_grad():
                self.assertEqual(model(batch()), reference(batch()))
            self.train_both(model, reference)

    def test_cpu_offload(self) -> None:
        with self.group():
            policy = CPUOffloadPolicy(pin_memory=False)
            self.train_both(sharded(network(), offload_policy=policy), network(), torch.optim.Adam)

    def test_replicas_of_shards(self) -> None:
        with self.group():
            mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
            model = sharded(network(), mesh=mesh)
            self.assertEqual(model[0].weight.device_mesh.mesh, mesh.mesh)
            self.assertEqual(model[0].weight.to_local().shape, (6, 8))
            self.train_both(model, network())

    def test_replicas_reduce_when_asked(self) -> None:
        with self.group():
            mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
            model, reference = sharded(network(), mesh=mesh), network()
            for seed in range(2):
                model.set_requires_all_reduce(seed == 1)
                backward(model, self.mine(batch(seed)))
                backward(reference, batch(seed))
            self.assert_same(model, reference, gradients=True)

    def test_on_top_of_tensor_parallel(self) -> None:
        with self.group():
            mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
            plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
            model = sharded(parallelize_module(network()[:4], mesh["tp"], plan), mesh=mesh["dp"])
            reference = network()[:4]
            batches = [batch(seed) for seed in range(2)]
            replica = mesh["dp"].get_local_rank()
            train(model, [rows.chunk(2)[replica] for rows in batches])
            train(reference, batches)
            self.assertEqual(model[0].weight.to_local().shape, (3, 8))
            self.assert_same(model, reference)


instantiate_parametrized_tests(ShardedTrainingTest)
