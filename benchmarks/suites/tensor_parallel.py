"""Modules parallelised over the ranks of a mesh, against the same modules as they are."""

# mypy: allow-subclassing-any, allow-untyped-decorators

from __future__ import annotations

from copy import deepcopy
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.testing._internal.common_utils import instantiate_parametrized_tests, parametrize
from torch.testing._internal.distributed._tensor.common_dtensor import (
    DTensorTestBase,
    with_comms,
)

from benchmarks.arms import on_arm

Base: Any = on_arm(DTensorTestBase)


class FeedForward(nn.Module):
    def __init__(self, bias: bool = True) -> None:
        super().__init__()
        self.up = nn.Linear(6, 16, bias=bias)
        self.down = nn.Linear(16, 6, bias=bias)

    def forward(self, batch: torch.Tensor) -> Any:
        return self.down(F.gelu(self.up(batch)))


class Block(nn.Module):
    """Attention of 4 heads and a feed-forward network, with a norm before each."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.LayerNorm(8)
        self.qkv = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.out = nn.Linear(8, 8)
        self.second = nn.LayerNorm(8)
        self.up = nn.Linear(8, 16)
        self.down = nn.Linear(16, 8)

    def forward(self, batch: Any) -> Any:
        normed = self.first(batch)
        q, k, v = (linear(normed).unflatten(-1, (-1, 2)).transpose(1, 2) for linear in self.qkv)
        attended = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        batch = batch + self.out(attended)
        return batch + self.down(F.relu(self.up(self.second(batch))))


BLOCK_PLAN = {
    "qkv.*": ColwiseParallel(),
    "out": RowwiseParallel(),
    "up": ColwiseParallel(),
    "down": RowwiseParallel(),
}


def whole(tensor: Any) -> Any:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


class ParallelTest(Base):
    """A class of tests that compare a parallelised module with the module it was made from."""

    def assert_same_gradients(self, model: Any, plain: Any) -> None:
        for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            self.assertEqual(whole(ours.grad), theirs.grad, atol=1e-4, rtol=1e-4)

    def assert_same_parameters(self, model: Any, plain: Any) -> None:
        for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            self.assertEqual(whole(ours), theirs, atol=1e-4, rtol=1e-4)

    def assert_trains_alike(self, model: Any, plain: Any, batch: torch.Tensor) -> None:
        """Forward, backward and one step of each optimizer."""
        outputs = model(batch), plain(batch)
        self.assertEqual(*outputs)
        for output in outputs:
            output.square().sum().backward()
        self.assert_same_gradients(model, plain)
        for module in (model, plain):
            torch.optim.SGD(module.parameters(), lr=0.01).step()
        self.assert_same_parameters(model, plain)


class StyleTest(ParallelTest):
    @parametrize("bias", [False, True])
    @with_comms
    def test_colwise_linear(self, bias: bool) -> None:
        mesh = self.build_device_mesh()
        plain = nn.Linear(6, 8, bias=bias)
        model = parallelize_module(deepcopy(plain), mesh, ColwiseParallel())
        self.assertEqual(model.weight.placements, (Shard(0),))
        batch = torch.randn(5, 6)
        self.assertEqual(model(batch), plain(batch).chunk(4, -1)[self.rank])

    @parametrize("bias", [False, True])
    @with_comms
    def test_rowwise_linear(self, bias: bool) -> None:
        mesh = self.build_device_mesh()
        plain = nn.Linear(8, 6, bias=bias)
        model = parallelize_module(deepcopy(plain), mesh, RowwiseParallel())
        self.assertEqual(model.weight.placements, (Shard(1),))
        batch = torch.randn(5, 8)
        self.assertEqual(model(batch.chunk(4, -1)[self.rank]), plain(batch))

    @with_comms
    def test_colwise_embedding(self) -> None:
        mesh = self.build_device_mesh()
        plain = nn.Embedding(10, 8)
        style = ColwiseParallel(output_layouts=Replicate())
        model = parallelize_module(deepcopy(plain), mesh, style)
        self.assertEqual(model.weight.placements, (Shard(1),))
        self.assert_trains_alike(model, plain, torch.randint(0, 10, (3, 5)))

    @with_comms
    def test_rowwise_embedding(self) -> None:
        mesh = self.build_device_mesh()
        plain = nn.Embedding(10, 8)
        style = RowwiseParallel(input_layouts=Replicate())
        model = parallelize_module(deepcopy(plain), mesh, style)
        self.assertEqual(model.weight.placements, (Shard(0),))
        self.assert_trains_alike(model, plain, torch.randint(0, 10, (3, 5)))

    @with_comms
    def test_dtensor_output(self) -> None:
        mesh = self.build_device_mesh()
        plain = nn.Linear(6, 8)
        model = parallelize_module(deepcopy(plain), mesh, ColwiseParallel(use_local_output=False))
        batch = torch.randn(5, 6)
        output = model(batch)
        self.assertEqual(output.placements, (Shard(1),))
        self.assertEqual(output.full_tensor(), plain(batch))

    @parametrize("layout", [Shard(0), Replicate()], name_fn=lambda p: type(p).__name__.lower())
    @with_comms
    def test_layouts(self, layout: Any) -> None:
        mesh = self.build_device_mesh()
        plain = FeedForward()
        plan = {
            "up": ColwiseParallel(input_layouts=layout),
            "down": RowwiseParallel(output_layouts=layout),
        }
        model = parallelize_module(deepcopy(plain), mesh, plan)
        batch = torch.randn(8, 6)
        mine = distribute_tensor(batch, mesh, [layout]).to_local()
        expected = distribute_tensor(plain(batch).detach(), mesh, [layout]).to_local()
        self.assertEqual(model(mine), expected)

    @parametrize("norm", [nn.LayerNorm, nn.RMSNorm], name_fn=lambda norm: norm.__name__.lower())
    @with_comms
    def test_sequence_norm(self, norm: Any) -> None:
        mesh = self.build_device_mesh()
        plain = norm(6)
        model = parallelize_module(deepcopy(plain), mesh, SequenceParallel())
        batch = torch.randn(2, 8, 6)
        output = model(distribute_tensor(batch, mesh, [Shard(1)]))
        self.assertEqual(output.placements, (Shard(1),))
        self.assertEqual(output.full_tensor(), plain(batch))
        output.square().sum().backward()
        plain(batch).square().sum().backward()
        self.assert_same_gradients(model, plain)

    @with_comms
    def test_sequence_dropout(self) -> None:
        mesh = self.build_device_mesh()
        model = parallelize_module(
            nn.Dropout(0.5), mesh, SequenceParallel(sequence_dim=0, use_local_output=True)
        )
        mine = torch.ones(4, 6)
        self.init_manual_seed_for_rank()
        dropped = model(mine)
        self.init_manual_seed_for_rank()
        self.assertEqual(dropped, F.dropout(mine, 0.5))
        self.assertEqual(model.eval()(mine), mine)


class PrepareTest(ParallelTest):
    @with_comms
    def test_input(self) -> None:
        mesh = self.build_device_mesh()
        style = PrepareModuleInput(
            input_layouts=Shard(0), desired_input_layouts=Replicate(), use_local_output=True
        )
        model = parallelize_module(nn.Identity(), mesh, style)
        batch = torch.randn(8, 6)
        self.assertEqual(model(batch.chunk(4)[self.rank]), batch)

    @with_comms
    def test_keywords(self) -> None:
        class Scaled(nn.Module):
            def forward(self, batch: Any, *, scale: Any, offset: float) -> Any:
                return batch * scale + offset

        mesh = self.build_device_mesh()
        style = PrepareModuleInput(
            input_layouts=(Shard(0),),
            desired_input_layouts=(Shard(1),),
            input_kwarg_layouts={"scale": Replicate()},
            desired_input_kwarg_layouts={"scale": Shard(1)},
        )
        model = parallelize_module(Scaled(), mesh, style)
        batch, scale = torch.randn(8, 4), torch.randn(8, 4)
        output = model(batch.chunk(4)[self.rank], scale=scale, offset=1.0)
        self.assertEqual(output.placements, (Shard(1),))
        self.assertEqual(output.full_tensor(), batch * scale + 1)

    @with_comms
    def test_output(self) -> None:
        mesh = self.build_device_mesh()
        style = PrepareModuleOutput(output_layouts=Shard(0), desired_output_layouts=Replicate())
        model = parallelize_module(nn.ReLU(), mesh, style)
        mine = torch.full((2, 3), float(self.rank))
        self.assertEqual(model(mine)[:, 0], torch.arange(4.0).repeat_interleave(2))

    @with_comms
    def test_input_and_output(self) -> None:
        mesh = self.build_device_mesh()
        style = PrepareModuleInputOutput(
            input_layouts=Shard(0),
            desired_input_layouts=Shard(1),
            use_local_input=True,
            output_layouts=Shard(1),
            desired_output_layouts=Shard(0),
        )
        model = parallelize_module(nn.Softplus(), mesh, style)
        batch = torch.randn(8, 4)
        mine = batch.chunk(4)[self.rank]
        self.assertEqual(model(mine), F.softplus(mine))


class PlanTest(ParallelTest):
    @parametrize("bias", [False, True])
    @with_comms
    def test_feed_forward(self, bias: bool) -> None:
        mesh = self.build_device_mesh()
        plain = FeedForward(bias)
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        model = parallelize_module(deepcopy(plain), mesh, plan)
        with CommDebugMode() as mode:
            model(torch.randn(4, 6))
        self.assertEqual(mode.get_total_counts(), 1)
        self.assert_trains_alike(model, plain, torch.randn(4, 6))

    @with_comms
    def test_steps_of_adam(self) -> None:
        mesh = self.build_device_mesh()
        plain = FeedForward()
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        model = parallelize_module(deepcopy(plain), mesh, plan)
        optimizers = [torch.optim.AdamW(m.parameters(), lr=0.01) for m in (model, plain)]
        for _ in range(3):
            batch = torch.randn(4, 6)
            for module, optimizer in zip((model, plain), optimizers, strict=True):
                module(batch).square().sum().backward()
                optimizer.step()
                optimizer.zero_grad()
        self.assert_same_parameters(model, plain)

    @with_comms
    def test_wildcards(self) -> None:
        mesh = self.build_device_mesh()
        plain = nn.ModuleDict({f"layer{n}": FeedForward() for n in range(2)})
        plan = {"layer*.up": ColwiseParallel(), "layer1.down": RowwiseParallel()}
        model = parallelize_module(deepcopy(plain), mesh, plan)
        self.assertEqual(model["layer0"].up.weight.placements, (Shard(0),))
        self.assertEqual(model["layer1"].down.weight.placements, (Shard(1),))
        self.assertNotIsInstance(model["layer0"].down.weight, DTensor)

    @with_comms
    def test_unused_plan_is_told(self) -> None:
        mesh = self.build_device_mesh()
        with self.assertWarnsRegex(UserWarning, "nothing"):
            parallelize_module(FeedForward(), mesh, {"nothing": ColwiseParallel()})

    @with_comms
    def test_sequence_parallel(self) -> None:
        mesh = self.build_device_mesh()
        plain = nn.Sequential(nn.LayerNorm(6), FeedForward())
        plan = {
            "0": SequenceParallel(sequence_dim=0),
            "1.up": ColwiseParallel(input_layouts=Shard(0)),
            "1.down": RowwiseParallel(output_layouts=Shard(0)),
        }
        model = parallelize_module(deepcopy(plain), mesh, plan)
        batch = torch.randn(8, 6)
        mine = batch.chunk(4)[self.rank]
        output = model(mine)
        self.assertEqual(output, plain(batch).chunk(4)[self.rank])
        output.square().sum().backward()
        plain(batch).square().sum().backward()
        self.assert_same_gradients(model, plain)

    @with_comms
    def test_block(self) -> None:
        mesh = self.build_device_mesh()
        plain = Block()
        model = parallelize_module(deepcopy(plain), mesh, BLOCK_PLAN)
        self.assert_trains_alike(model, plain, torch.randn(2, 5, 8))

    @with_comms
    def test_state_dict(self) -> None:
        mesh = self.build_device_mesh()
        plain = FeedForward()
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        model = parallelize_module(deepcopy(plain), mesh, plan)
        other = parallelize_module(FeedForward(), mesh, plan)
        other.load_state_dict(model.state_dict())
        batch = torch.randn(4, 6)
        self.assertEqual(other(batch), plain(batch))


class LossParallelTest(ParallelTest):
    @parametrize("reduction", ["none", "mean", "sum"])
    @with_comms
    def test_cross_entropy(self, reduction: str) -> None:
        mesh = self.build_device_mesh()
        logits = torch.randn(5, 8, requires_grad=True)
        target = torch.randint(0, 8, (5,))
        sharded = distribute_tensor(logits.detach(), mesh, [Shard(1)]).requires_grad_()
        expected = F.cross_entropy(logits, target, reduction=reduction)
        expected.sum().backward()
        with loss_parallel():
            loss = F.cross_entropy(sharded, target, reduction=reduction)
            loss.sum().backward()
        self.assertEqual(loss.full_tensor(), expected)
        self.assertEqual(sharded.grad.placements, (Shard(1),))
        self.assertEqual(sharded.grad.full_tensor(), logits.grad)

    @with_comms
    def test_weights_and_ignored_targets(self) -> None:
        mesh = self.build_device_mesh()
        logits, weight = torch.randn(6, 7), torch.rand(7)
        target = torch.tensor([0, -100, 6, 3, -100, 1])
        with loss_parallel():
            loss = F.cross_entropy(
                distribute_tensor(logits, mesh, [Shard(1)]),
                target,
                weight=distribute_tensor(weight, mesh, [Replicate()]),
            )
        self.assertEqual(loss.full_tensor(), F.cross_entropy(logits, target, weight))

    @with_comms
    def test_whole_model(self) -> None:
        mesh = self.build_device_mesh()
        plain = nn.Linear(6, 12)
        style = ColwiseParallel(use_local_output=False)
        model = parallelize_module(deepcopy(plain), mesh, style)
        batch, target = torch.randn(5, 6), torch.randint(0, 12, (5,))
        with loss_parallel(), CommDebugMode() as mode:
            F.cross_entropy(model(batch), target).backward()
        F.cross_entropy(plain(batch), target).backward()
        self.assert_same_gradients(model, plain)
        self.assertNotIn(torch.ops.c10d_functional.all_gather_into_tensor, mode.get_comm_counts())


class SliceTest(ParallelTest):
    """Tensor parallel on one dimension of a mesh, data parallel by hand on the other."""

    def grid(self) -> Any:
        return init_device_mesh(self.device_type, (2, 2), mesh_dim_names=("dp", "tp"))

    @with_comms
    def test_feed_forward(self) -> None:
        mesh = self.grid()
        plain = FeedForward()
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        model = parallelize_module(deepcopy(plain), mesh["tp"], plan)
        self.assertEqual(model.up.weight.to_local(), plain.up.weight.chunk(2)[self.rank % 2])
        self.assert_trains_alike(model, plain, torch.randn(4, 6))

    @with_comms
    def test_block(self) -> None:
        mesh = self.grid()
        plain = Block()
        model = parallelize_module(deepcopy(plain), mesh["tp"], BLOCK_PLAN)
        self.assert_trains_alike(model, plain, torch.randn(2, 5, 8))

    @with_comms
    def test_averaged_over_replicas(self) -> None:
        mesh = self.grid()
        plain = FeedForward()
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        model = parallelize_module(deepcopy(plain), mesh["tp"], plan)
        batch = torch.randn(8, 6)
        model(batch.chunk(2)[mesh.get_local_rank("dp")]).square().sum().backward()
        for parameter in model.parameters():
            slope = parameter.grad
            local = slope.to_local() if isinstance(slope, DTensor) else slope
            torch.distributed.all_reduce(local, group=mesh.get_group("dp"))
        plain(batch).square().sum().backward()
        self.assert_same_gradients(model, plain)

    @with_comms
    def test_loss_over_the_grid(self) -> None:
        mesh = self.grid()
        logits, target = torch.randn(6, 8), torch.randint(0, 8, (6,))
        with loss_parallel():
            loss = F.cross_entropy(
                distribute_tensor(logits, mesh, [Shard(0), Shard(1)]),
                distribute_tensor(target, mesh, [Shard(0), Replicate()]),
                reduction="sum",
            )
        expected = F.cross_entropy(logits, target, reduction="sum")
        self.assertEqual(loss.full_tensor(), expected)

    @with_comms
    def test_whole_grid_is_refused(self) -> None:
        with self.assertRaisesRegex(ValueError, "device_mesh.ndim"):
            parallelize_module(FeedForward(), self.grid(), {"up": ColwiseParallel()})


instantiate_parametrized_tests(StyleTest)
instantiate_parametrized_tests(PlanTest)
instantiate_parametrized_tests(LossParallelTest)
