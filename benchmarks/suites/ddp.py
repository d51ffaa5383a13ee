"""DistributedDataParallel, against training on one process."""

# mypy: allow-subclassing-any, allow-untyped-decorators

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP  # noqa: N817
from torch.nn.utils import clip_grad_norm_
from torch.testing._internal.common_utils import (
    instantiate_parametrized_tests,
    parametrize,
    subtest,
)
from torch.utils.checkpoint import checkpoint

from benchmarks.models import TrainingTest, backward, batch, network


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


class DataParallelTest(TrainingTest):
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


instantiate_parametrized_tests(DataParallelTest)
