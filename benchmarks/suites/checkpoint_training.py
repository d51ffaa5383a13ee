"""Checkpoints of models and optimizers in training, under each way to distribute them."""

# mypy: allow-subclassing-any, allow-untyped-decorators

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.common_utils import instantiate_parametrized_tests, parametrize

from benchmarks.base import GroupTest
from benchmarks.models import batch, network, train, whole


def distributed(how: str, model: Any) -> Any:
    """The model, distributed in one of several ways."""
    if how == "ddp":
        return DistributedDataParallel(model)
    if how == "fsdp1":
        mesh = init_device_mesh("cpu", (4,))
        return FullyShardedDataParallel(model, device_mesh=mesh, device_id=torch.device("cpu"))
    if how == "fsdp2":
        return fully_shard(model)
    if how == "hsdp":
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        return fully_shard(model, mesh=mesh)
    if how == "tp":
        plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
        return parallelize_module(model, init_device_mesh("cpu", (4,)), plan)
    return model


class Application:
    """A model and its optimizer as one object of a checkpoint."""

    def __init__(self, model: Any, optimizer: Any) -> None:
        self.model, self.optimizer = model, optimizer

    def state_dict(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )


class TrainingTest(GroupTest):
    def trained(self, how: str, seed: int = 0, kind: Any = torch.optim.Adam) -> tuple[Any, Any]:
        """A distributed network and its optimizer, after a step that was alike on every rank."""
        model = distributed(how, network(seed))
        return model, train(model, [batch(seed)], kind)

    def assert_plain(self, model: Any, *batches: int) -> None:
        """The state of the model is that of one trained by one process."""
        plain = network()
        train(plain, [batch(seed) for seed in batches], torch.optim.Adam)
        state = {name: whole(value) for name, value in get_model_state_dict(model).items()}
        self.assertEqual(state, dict(plain.state_dict()))

    @parametrize(
        "how",
        [
            "plain_to_fsdp2",
            "ddp_to_fsdp2",
            "ddp_to_tp",
            "fsdp1_to_fsdp2",
            "fsdp2_to_plain",
            "fsdp2_to_hsdp",
            "fsdp2_to_tp",
            "hsdp_to_fsdp1",
            "tp_to_ddp",
        ],
    )
    def test_model_moves(self, how: str) -> None:
        source, target = how.split("_to_")
        with self.group(), self.shared_folder() as folder:
            state = get_model_state_dict(self.trained(source)[0])
            dcp.save(state, checkpoint_id=folder)
            model, _ = self.trained(target, seed=1)
            state = get_model_state_dict(model)
            dcp.load(state, checkpoint_id=folder)
            set_model_state_dict(model, state)
            self.assert_plain(model, 0)

    @parametrize("how", ["ddp_to_fsdp2", "fsdp2_to_fsdp2", "fsdp2_to_tp", "tp_to_hsdp"])
    def test_training_is_taken_up(self, how: str) -> None:
        source, target = how.split("_to_")
        with self.group(), self.shared_folder() as folder:
            dcp.save({"app": Application(*self.trained(source))}, checkpoint_id=folder)
            model, optimizer = self.trained(target, seed=1)
            dcp.load({"app": Application(model, optimizer)}, checkpoint_id=folder)
            optimizer.zero_grad()
            model(batch(2)).square().mean().backward()
            optimizer.step()

            plain = network()
            expected = train(plain, [batch(0), batch(2)], torch.optim.Adam)
            self.assert_plain(model, 0, 2)
            states = (made.state_dict()["state"].values() for made in (optimizer, expected))
            for got, wanted in zip(*states, strict=True):
                self.assertEqual({name: whole(value) for name, value in got.items()}, wanted)

    def test_saved_while_training_goes_on(self) -> None:
        with self.group(), self.shared_folder() as folder:
            model, optimizer = self.trained("fsdp2")
            # A group of its own: the order of its collectives and of training's is not fixed.
            saving = dcp.async_save(
                get_model_state_dict(model), checkpoint_id=folder, process_group=dist.new_group()
            )
            model(batch(1)).square().mean().backward()
            optimizer.step()
            saving.result()
            state = get_model_state_dict(model)
            dcp.load(state, checkpoint_id=folder)
            set_model_state_dict(model, state)
            self.assert_plain(model, 0)

    def test_modules_are_stateful(self) -> None:
        with self.group(), self.shared_folder() as folder:
            dcp.save({"model": self.trained("fsdp2")[0]}, checkpoint_id=folder)
            model, _ = self.trained("fsdp2", seed=1)
            dcp.load({"model": model}, checkpoint_id=folder)
            self.assert_plain(model, 0)

    def test_one_layer_of_it(self) -> None:
        with self.group(), self.shared_folder() as folder:
            dcp.save({"model": self.trained("fsdp2")[0]}, checkpoint_id=folder)
            model, before = fully_shard(network(seed=1)), network(seed=1)
            state = {name: value for name, value in model.state_dict().items() if name[0] == "2"}
            dcp.load({"model": state}, checkpoint_id=folder)
            plain = network()
            train(plain, [batch(0)], torch.optim.Adam)
            self.assertEqual(model[2].weight.full_tensor(), plain[2].weight)
            self.assertEqual(model[0].weight.full_tensor(), before[0].weight)

    def test_flattened_optimizer(self) -> None:
        with self.group(), self.shared_folder() as folder:
            options = StateDictOptions(flatten_optimizer_state_dict=True)
            model, optimizer = self.trained("fsdp2")
            state = get_optimizer_state_dict(model, optimizer, options=options)
            self.assertIn("state.0.weight.exp_avg", state)
            self.assertEqual(state["param_groups.0.weight.lr"], 0.05)
            dcp.save(state, checkpoint_id=folder)

            other, fresh = self.trained("fsdp2", seed=1)
            state = get_optimizer_state_dict(other, fresh, options=options)
            dcp.load(state, checkpoint_id=folder)
            set_optimizer_state_dict(other, fresh, state, options=options)
            states = (made.state_dict()["state"].values() for made in (fresh, optimizer))
            for got, wanted in zip(*states, strict=True):
                self.assertEqual(got["exp_avg"].full_tensor(), wanted["exp_avg"].full_tensor())

    def test_groups_of_parameters(self) -> None:
        def optimizer_of(model: Any, rate: float) -> Any:
            groups = [{"params": model[0].parameters()}, {"params": model[2].parameters()}]
            groups[1]["lr"] = rate * 2
            return torch.optim.SGD(groups, lr=rate, momentum=0.9)

        with self.group(), self.shared_folder() as folder:
            model = fully_shard(network())
            optimizer = optimizer_of(model, 0.5)
            dcp.save(get_optimizer_state_dict(model, optimizer), checkpoint_id=folder)
            optimizer = optimizer_of(model, 0.1)
            state = get_optimizer_state_dict(model, optimizer)
            dcp.load(state, checkpoint_id=folder)
            set_optimizer_state_dict(model, optimizer, state)
            self.assertEqual([group["lr"] for group in optimizer.param_groups], [0.5, 1.0])

    def test_frozen_parameters_are_left_out(self) -> None:
        with self.group(), self.shared_folder() as folder:
            model = network()
            model[0].requires_grad_(False)
            options = StateDictOptions(ignore_frozen_params=True, strict=False)
            state = get_model_state_dict(fully_shard(model), options=options)
            self.assertEqual(list(state), ["2.weight", "2.bias", "4.weight", "4.bias"])
            dcp.save(state, checkpoint_id=folder)

            other = network(seed=1)
            state = {name: torch.zeros(value.shape) for name, value in state.items()}
            dcp.load(state, checkpoint_id=folder)
            set_model_state_dict(other, state, options=options)
            self.assertEqual(other[0].weight, network(seed=1)[0].weight)
            self.assertEqual(other[2].weight, network()[2].weight)

    def test_all_that_a_run_needs(self) -> None:
        with self.group(), self.shared_folder() as folder:
            model = fully_shard(nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5)))
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1)
            scheduler.step()
            state = {"step": 1, "scheduler": scheduler, "random": torch.get_rng_state()}
            dcp.save(state, checkpoint_id=folder)
            expected = model(batch())

            optimizer.param_groups[0]["lr"] = 0.1
            again = torch.optim.lr_scheduler.StepLR(optimizer, step_size=5)
            state = {"step": 0, "scheduler": again, "random": torch.zeros_like(state["random"])}
            dcp.load(state, checkpoint_id=folder)
            torch.set_rng_state(state["random"])
            self.assertEqual(model(batch()), expected)
            self.assertEqual((state["step"], again.last_epoch, again.step_size), (1, 1, 1))


instantiate_parametrized_tests(TrainingTest)
