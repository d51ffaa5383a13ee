"""DistributedDataParallel, and its companions, against training on one process."""

# mypy: allow-subclassing-any, allow-untyped-decorators

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.algorithms.join import Join
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel as DDP  # noqa: N817
from torch.nn.utils import clip_grad_norm_
from torch.testing._internal.common_utils import (
    instantiate_parametrized_tests,
    parametrize,
    subtest,
)
from torch.utils.checkpoint import checkpoint

from benchmarks.base import GroupTest
from benchmarks.models import backward, batch, network, train


class Branches(nn.Module):
    """Only one of its layers is used by a forward pass."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(8, 4) for _ in range(3))
        self.taken = 0

    def forward(self, rows: Any) -> Any:
        return self.layers[self.taken](rows)


class Mixed(nn.Module):
    """An embedding, a recurrent layer and a normalized one, with outputs in a dictionary."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.Embedding(10, 8)
        self.recurrent = nn.GRU(8, 6, batch_first=True)
        self.scores = nn.Sequential(nn.LayerNorm(6), nn.Linear(6, 3))

    def forward(self, words: Any) -> dict[str, Any]:
        states, last = self.recurrent(self.words(words))
        return {"states": states, "scores": self.scores(last[0])}


class Base(GroupTest):
    def mine(self, rows: Any) -> Any:
        """This rank's part of a batch."""
        return rows.chunk(self.world_size)[self.rank]

    def assert_same(
        self, model: Any, reference: Any, *, gradients: bool = False, **tolerance: float
    ) -> None:
        """Parameters (or gradients) are those of the plain model."""
        for got, wanted in zip(model.parameters(), reference.parameters(), strict=True):
            if gradients:
                got, wanted = got.grad, wanted.grad
            self.assertEqual(got, wanted, **tolerance)


class DataParallelTest(Base):
    def train_both(self, model: Any, reference: Any, kind: Any = torch.optim.SGD) -> None:
        batches = [batch(seed) for seed in range(3)]
        train(reference, batches, kind)
        train(model, map(self.mine, batches), kind)
        self.assert_same(model, reference)

    @parametrize(
        "options",
        [
            subtest({}, "default"),
            subtest({"bucket_cap_mb": 0.0001}, "small_buckets"),
            subtest({"gradient_as_bucket_view": True}, "views"),
            subtest({"static_graph": True}, "static_graph"),
            subtest({"find_unused_parameters": True}, "find_unused"),
            subtest({"broadcast_buffers": False, "init_sync": False}, "nothing_broadcast"),
        ],
    )
    def test_training(self, options: dict[str, Any]) -> None:
        with self.group():
            self.train_both(DDP(network(), **options), network(), torch.optim.Adam)

    def test_starts_from_rank_0(self) -> None:
        with self.group():
            self.train_both(DDP(network(seed=self.rank)), network(seed=0))

    def test_nothing_to_train(self) -> None:
        with self.group(), self.assertRaisesRegex(RuntimeError, "requires a gradient"):
            DDP(network().requires_grad_(False))

    @parametrize("views", [False, True])
    def test_no_sync(self, views: bool) -> None:
        with self.group():
            model, reference = DDP(network(), gradient_as_bucket_view=views), network()
            local = network()
            with model.no_sync():
                for seed in range(2):
                    backward(model, self.mine(batch(seed)))
                    backward(local, self.mine(batch(seed)))
            self.assert_same(model, local, gradients=True)
            backward(model, self.mine(batch(2)))
            for seed in range(3):
                backward(reference, batch(seed))
            self.assert_same(model, reference, gradients=True)

    def test_views_share_memory(self) -> None:
        with self.group():
            model = DDP(network(), gradient_as_bucket_view=True)
            for seed in range(2):
                model.zero_grad(set_to_none=False)
                backward(model, self.mine(batch(seed)))
            storages = {p.grad.untyped_storage().data_ptr() for p in model.parameters()}
            self.assertEqual(len(storages), 1)

    def test_unused_layers(self) -> None:
        with self.group():
            model, reference = DDP(Branches(), find_unused_parameters=True), Branches()
            for taken in (0, 2):
                model.module.taken = reference.taken = taken
                backward(model, self.mine(batch(taken)))
                backward(reference, batch(taken))
            self.assertIsNone(model.module.layers[1].weight.grad)
            self.assert_same(model, reference, gradients=True)

    def test_layers_used_by_some_ranks(self) -> None:
        with self.group():
            model = DDP(Branches(), find_unused_parameters=True)
            model.module.taken = self.rank % 2
            backward(model, self.mine(batch()))
            for taken in range(2):
                reference = Branches()
                reference.taken = taken
                for part in batch().chunk(4)[taken::2]:
                    backward(reference, part)
                got, wanted = model.module.layers[taken], reference.layers[taken]
                self.assertEqual(got.weight.grad, wanted.weight.grad / self.world_size)

    def test_unused_layers_are_an_error(self) -> None:
        with self.group():
            model = DDP(Branches())
            backward(model, self.mine(batch()))
            with self.assertRaisesRegex(RuntimeError, "Expected to have finished reduction"):
                backward(model, self.mine(batch()))

    def test_frozen_parameters(self) -> None:
        with self.group():
            model, reference = network(), network()
            for whole in (model, reference):
                whole[0].requires_grad_(False)
            self.train_both(DDP(model), reference)
            self.assertIsNone(model[0].weight.grad)
            self.assertEqual(model[0].weight, network()[0].weight)

    def test_ignored_parameters(self) -> None:
        with self.group():
            model = network()
            DDP._set_params_and_buffers_to_ignore_for_model(model, ["2.weight", "2.bias"])
            local, reference = network(), network()
            backward(DDP(model), self.mine(batch()))
            backward(local, self.mine(batch()))
            backward(reference, batch())
            self.assert_same(model[2], local[2], gradients=True)
            self.assert_same(model[0], reference[0], gradients=True)

    def test_mixed_modules(self) -> None:
        with self.group():
            model, reference = DDP(Mixed()), Mixed()
            words = torch.arange(24).reshape(8, 3) % 10
            for whole, part in ((model, self.mine(words)), (reference, words)):
                made = whole(part)
                (made["scores"].square().mean() + made["states"].abs().mean()).backward()
            self.assert_same(model, reference, gradients=True)

    def test_shared_weight(self) -> None:
        with self.group():
            torch.manual_seed(0)
            reference = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
            reference[1].weight = reference[0].weight
            model = copy.deepcopy(reference)
            self.train_both(DDP(model), reference)
            self.assertIs(model[1].weight, model[0].weight)

    def test_two_forwards(self) -> None:
        with self.group():
            model, reference = DDP(network()), network()
            for whole, part in ((model, self.mine), (reference, lambda rows: rows)):
                losses = [whole(part(batch(seed))).square().mean() for seed in range(2)]
                sum(losses).backward()
            self.assert_same(model, reference, gradients=True)

    def test_activation_checkpoint(self) -> None:
        class Again(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.inner = network()

            def forward(self, rows: Any) -> Any:
                return checkpoint(self.inner, rows, use_reentrant=False)

        with self.group():
            self.train_both(DDP(Again()), Again())

    def test_clip_grad_norm(self) -> None:
        with self.group():
            model, reference = DDP(network()), network()
            backward(model, self.mine(batch()))
            backward(reference, batch())
            norms = [clip_grad_norm_(whole.parameters(), 0.05) for whole in (model, reference)]
            self.assertEqual(*norms)
            self.assert_same(model, reference, gradients=True)

    @parametrize("broadcast", [False, True])
    def test_buffers(self, broadcast: bool) -> None:
        with self.group():
            model = DDP(nn.BatchNorm1d(8), broadcast_buffers=broadcast)
            plain = nn.BatchNorm1d(8)
            for seed in range(2):
                model(self.mine(batch(seed)))
                # Broadcast before each forward pass: only the last one is a rank's own.
                plain(batch(seed).chunk(4)[0 if broadcast and seed == 0 else self.rank])
            self.assertEqual(model.module.running_mean, plain.running_mean)
            self.assertEqual(model.module.running_var, plain.running_var)

    def test_states(self) -> None:
        with self.group():
            model, reference = DDP(network()), network()
            self.train_both(model, reference)
            state = {name.removeprefix("module."): t for name, t in model.state_dict().items()}
            self.assertEqual(state, dict(reference.state_dict()))
            other = DDP(network(seed=1))
            other.load_state_dict(model.state_dict())
            self.assert_same(other, reference)

    def test_logged(self) -> None:
        with self.group():
            model = DDP(network(), bucket_cap_mb=1, gradient_as_bucket_view=True)
            backward(model, self.mine(batch()))
            data = model._get_ddp_logging_data()
            self.assertEqual(data["world_size"], self.world_size)
            self.assertEqual(data["rank"], self.rank)
            self.assertEqual(data["bucket_cap_bytes"], 1024 * 1024)
            self.assertEqual(data["num_parameter_tensors"], 6)
            self.assertEqual(data["gradient_as_bucket_view"], 1)


class CommunicationTest(Base):
    def check(self, model: Any, *, factor: float = 1.0, compressed: bool = False) -> None:
        """Gradients are a factor times the average; as near as half precision allows."""
        reference = network()
        (reference(batch()).square().mean() * factor).backward()
        backward(model, self.mine(batch()))
        tolerance = {"atol": 1e-4, "rtol": 1e-2} if compressed else {}
        self.assert_same(model, reference, gradients=True, **tolerance)

    def test_all_reduce_hook(self) -> None:
        with self.group():
            model = DDP(network())
            model.register_comm_hook(None, default_hooks.allreduce_hook)
            self.check(model)

    @parametrize(
        "hook",
        [
            subtest(default_hooks.fp16_compress_hook, "alone"),
            subtest(default_hooks.fp16_compress_wrapper(default_hooks.allreduce_hook), "around"),
        ],
    )
    def test_compression(self, hook: Any) -> None:
        with self.group():
            model = DDP(network())
            model.register_comm_hook(None, hook)
            self.check(model, compressed=True)

    def test_own_hook(self) -> None:
        def three_times(state: list[int], bucket: Any) -> Any:
            state.append(len(bucket.gradients()))
            tensor = bucket.buffer().mul_(3 / self.world_size)
            work = dist.all_reduce(tensor, async_op=True)
            return work.get_future().then(lambda done: done.value()[0])

        with self.group():
            buckets: list[int] = []
            model = DDP(network(), bucket_cap_mb=0.0001)
            # DDP takes no annotation for a bucket that is a string.
            three_times.__annotations__.clear()
            model.register_comm_hook(buckets, three_times)
            self.check(model, factor=3.0)
            self.assertEqual(sum(buckets), 6)

    def test_one_hook_only(self) -> None:
        with self.group():
            model = DDP(network())
            model.register_comm_hook(None, default_hooks.allreduce_hook)
            with self.assertRaisesRegex(RuntimeError, "only be called once"):
                model.register_comm_hook(None, default_hooks.allreduce_hook)

    def test_power_sgd_before_it_starts(self) -> None:
        with self.group():
            state = powerSGD_hook.PowerSGDState(None, start_powerSGD_iter=10)
            model = DDP(network())
            model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
            self.check(model)
            self.assertEqual(state.iter, 1)

    def test_power_sgd_keeps_the_error(self) -> None:
        with self.group():
            state = powerSGD_hook.PowerSGDState(
                None, start_powerSGD_iter=2, min_compression_rate=1, matrix_approximation_rank=1
            )
            model = DDP(network())
            model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
            for seed in range(4):
                model.zero_grad()
                backward(model, self.mine(batch(seed)))
            everyone = [torch.empty(12, 8) for _ in range(self.world_size)]
            dist.all_gather(everyone, model.module[0].weight.grad)
            self.assertEqual(everyone, [everyone[0]] * self.world_size)
            self.assertEqual(torch.linalg.matrix_rank(everyone[0], rtol=1e-4).item(), 1)
            self.assertGreater(max(error.norm() for error in state.error_dict.values()), 0)


class UnevenTest(Base):
    def test_join(self) -> None:
        with self.group():
            model, reference = DDP(network()), network()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
            plain = torch.optim.SGD(reference.parameters(), lr=0.05)
            with model.join():
                for step in range(self.rank + 1):
                    optimizer.zero_grad()
                    backward(model, batch(step).chunk(4)[self.rank])
                    optimizer.step()
            # A rank that has ended counts as one whose gradients are zero.
            for step in range(self.world_size):
                plain.zero_grad()
                for part in batch(step).chunk(4)[step:]:
                    (reference(part).square().mean() / self.world_size).backward()
                plain.step()
            self.assert_same(model, reference)

    def test_join_divides_by_those_that_are_left(self) -> None:
        with self.group():
            model, reference = DDP(network()), network()
            with model.join(divide_by_initial_world_size=False):
                for step in range(1 + (self.rank > 1)):
                    model.zero_grad()
                    backward(model, batch(step).chunk(4)[self.rank])
            backward(reference, batch(1).chunk(2)[1])
            if self.rank > 1:
                self.assert_same(model, reference, gradients=True)

    def test_join_throws_where_the_first_ends(self) -> None:
        with self.group():
            model, done = DDP(network()), 0
            with self.assertRaisesRegex(RuntimeError, "exhausted"):
                with model.join(throw_on_early_termination=True):
                    for step in range(2 + self.rank):
                        backward(model, batch(step))
                        done += 1
            self.assertEqual(done, 2)

    def test_join_with_sharded_optimizer(self) -> None:
        with self.group():
            model = DDP(network(), gradient_as_bucket_view=True)
            optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.05)
            with Join([model, optimizer]):
                for step in range(1 + self.rank):
                    optimizer.zero_grad()
                    backward(model, batch(step))
                    optimizer.step()
            everyone = [torch.empty(12, 8) for _ in range(self.world_size)]
            dist.all_gather(everyone, model.module[0].weight.detach())
            self.assertEqual(everyone, [everyone[0]] * self.world_size)
            self.assertNotEqual(everyone[0], network()[0].weight)


class OptimizersTest(Base):
    @parametrize("kind", [subtest(getattr(torch.optim, n), n) for n in ("Adam", "SGD")])
    def test_zero_redundancy(self, kind: Any) -> None:
        def sharded(parameters: Any, lr: float) -> Any:
            return ZeroRedundancyOptimizer(parameters, kind, lr=lr)

        with self.group():
            model, reference = DDP(network()), network()
            batches = [batch(seed) for seed in range(3)]
            optimizer = train(model, map(self.mine, batches), sharded)
            expected = train(reference, batches, kind)
            self.assert_same(model, reference)
            self.assertLess(len(optimizer.optim.param_groups[0]["params"]), 6)
            optimizer.consolidate_state_dict(to=0)
            if self.rank == 0:
                self.assertEqual(optimizer.state_dict()["state"], expected.state_dict()["state"])

    def test_averaged_models(self) -> None:
        with self.group():
            model = network()
            train(model, [self.mine(batch())])
            PeriodicModelAverager(period=2).average_parameters(model.parameters())
            everyone = []
            for part in batch().chunk(self.world_size):
                everyone.append(network())
                train(everyone[-1], [part])
            for name, got in model.named_parameters():
                parts = [local.get_parameter(name) for local in everyone]
                self.assertEqual(got, torch.stack(parts).mean(0))


instantiate_parametrized_tests(DataParallelTest)
instantiate_parametrized_tests(CommunicationTest)
instantiate_parametrized_tests(OptimizersTest)
