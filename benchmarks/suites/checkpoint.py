"""Saving, loading and resharding tensors and objects with torch.distributed.checkpoint."""

# mypy: allow-subclassing-any, allow-untyped-decorators

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save, torch_save_to_dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.testing._internal.common_utils import (
    instantiate_parametrized_tests,
    parametrize,
    subtest,
)

from benchmarks.base import GroupTest

#: Five rows and seven columns: no mesh of four ranks divides them evenly.
WHOLE = torch.arange(35.0).reshape(5, 7)

#: From which mesh and placements, to which.
MOVES = {
    "rows_to_rows": ((4,), (Shard(0),), (4,), (Shard(0),)),
    "rows_to_columns": ((4,), (Shard(0),), (4,), (Shard(1),)),
    "rows_to_replicas": ((4,), (Shard(0),), (4,), (Replicate(),)),
    "replicas_to_rows": ((4,), (Replicate(),), (4,), (Shard(0),)),
    "rows_to_blocks": ((4,), (Shard(0),), (2, 2), (Shard(0), Shard(1))),
    "blocks_to_columns": ((2, 2), (Shard(0), Shard(1)), (4,), (Shard(1),)),
    "blocks_to_transposed": ((2, 2), (Shard(0), Shard(1)), (2, 2), (Shard(1), Shard(0))),
    "hybrid_to_rows": ((2, 2), (Replicate(), Shard(0)), (4,), (Shard(0),)),
    "rows_to_hybrid": ((4,), (Shard(0),), (2, 2), (Replicate(), Shard(0))),
    "twice_to_once": ((2, 2), (Shard(0), Shard(0)), (4,), (Shard(0),)),
}


class Counter:
    """Something with a state of its own."""

    def __init__(self, count: int) -> None:
        self.count = count

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state["count"]


class TensorsTest(GroupTest):
    @parametrize("move", [subtest(move, name) for name, move in MOVES.items()])
    def test_reshard(self, move: Any) -> None:
        shape, placements, new_shape, new_placements = move
        with self.group(), self.shared_folder() as folder:
            saved = distribute_tensor(WHOLE, init_device_mesh("cpu", shape), placements)
            dcp.save({"t": saved}, checkpoint_id=folder)
            mesh = init_device_mesh("cpu", new_shape)
            state = {"t": distribute_tensor(torch.zeros(5, 7), mesh, new_placements)}
            dcp.load(state, checkpoint_id=folder)
            expected = distribute_tensor(WHOLE, mesh, new_placements)
            self.assertEqual(state["t"].to_local(), expected.to_local())
            self.assertEqual(state["t"].full_tensor(), WHOLE)

    @parametrize("dtype", [torch.bfloat16, torch.int64, torch.bool, torch.complex64])
    def test_data_types(self, dtype: torch.dtype) -> None:
        with self.group(), self.shared_folder() as folder:
            saved = WHOLE.to(dtype)
            dcp.save({"t": saved}, checkpoint_id=folder)
            state = {"t": torch.zeros(5, 7, dtype=dtype)}
            dcp.load(state, checkpoint_id=folder)
            self.assertEqual(state["t"], saved)

    def test_loaded_as_the_type_that_is_there(self) -> None:
        with self.group(), self.shared_folder() as folder:
            dcp.save({"t": WHOLE}, checkpoint_id=folder)
            state = {"t": torch.zeros(5, 7, dtype=torch.float64)}
            dcp.load(state, checkpoint_id=folder)
            self.assertEqual(state["t"], WHOLE.double())

    def test_in_place(self) -> None:
        with self.group(), self.shared_folder() as folder:
            dcp.save({"t": WHOLE}, checkpoint_id=folder)
            target = torch.zeros(7, 5).t()
            dcp.load({"t": target}, checkpoint_id=folder)
            self.assertEqual(target, WHOLE)

    def test_keys_of_each_rank(self) -> None:
        with self.group(), self.shared_folder() as folder:
            dcp.save({f"of {self.rank}": torch.full((3,), self.rank)}, checkpoint_id=folder)
            following = (self.rank + 1) % self.world_size
            state = {f"of {following}": torch.zeros(3, dtype=torch.int64)}
            dcp.load(state, checkpoint_id=folder)
            self.assertEqual(state, {f"of {following}": torch.full((3,), following)})

    def test_nested(self) -> None:
        with self.group(), self.shared_folder() as folder:
            saved = {"a": {"b": [WHOLE, {"c": WHOLE + 1}]}, "d": {"e": 3}}
            dcp.save(saved, checkpoint_id=folder)
            empty = torch.zeros(5, 7)
            state = {"a": {"b": [empty, {"c": empty.clone()}]}, "d": {"e": None}}
            dcp.load(state, checkpoint_id=folder)
            self.assertEqual(state, saved)

    def test_objects(self) -> None:
        with self.group(), self.shared_folder() as folder:
            saved = {"text": "some", "path": Path("a"), "type": torch.int8, f"{self.rank}": 1.5}
            dcp.save(saved, checkpoint_id=folder)
            state = dict.fromkeys(saved)
            dcp.load(state, checkpoint_id=folder)
            self.assertEqual(state, saved)

    def test_stateful(self) -> None:
        with self.group(), self.shared_folder() as folder:
            dcp.save({"counter": Counter(7)}, checkpoint_id=folder)
            counter = Counter(0)
            state = {"counter": counter}
            dcp.load(state, checkpoint_id=folder)
            self.assertIs(state["counter"], counter)
            self.assertEqual(counter.count, 7)

    def test_some_of_the_keys(self) -> None:
        with self.group(), self.shared_folder() as folder:
            dcp.save({"a": WHOLE, "b": WHOLE + 1}, checkpoint_id=folder)
            state = {"b": torch.zeros(5, 7)}
            dcp.load(state, checkpoint_id=folder)
            self.assertEqual(state, {"b": WHOLE + 1})

    def test_missing_key(self) -> None:
        with self.group(), self.shared_folder() as folder:
            dcp.save({"a": WHOLE}, checkpoint_id=folder)
            state = {"a": torch.zeros(5, 7), "b": torch.ones(2)}
            with self.assertRaisesRegex(dcp.CheckpointException, "Missing key .* b"):
                dcp.load(state, checkpoint_id=folder)
            dcp.load(
                state,
                checkpoint_id=folder,
                planner=dcp.DefaultLoadPlanner(allow_partial_load=True),
            )
            self.assertEqual(state, {"a": WHOLE, "b": torch.ones(2)})

    def test_another_size(self) -> None:
        with self.group(), self.shared_folder() as folder:
            dcp.save({"a": WHOLE}, checkpoint_id=folder)
            with self.assertRaisesRegex(dcp.CheckpointException, "Size mismatch"):
                dcp.load({"a": torch.zeros(5, 6)}, checkpoint_id=folder)

    def test_nothing_to_load(self) -> None:
        with self.group(), self.shared_folder() as folder:
            with self.assertRaises(dcp.CheckpointException):
                dcp.load({"a": torch.zeros(5, 7)}, checkpoint_id=folder)

    def test_saved_while_it_changes(self) -> None:
        with self.group(), self.shared_folder() as folder:
            mesh = init_device_mesh("cpu", (4,))
            tensor = distribute_tensor(WHOLE, mesh, [Shard(0)])
            saving = dcp.async_save({"t": tensor}, checkpoint_id=folder)
            tensor.add_(1)
            saving.result()
            state = {"t": torch.zeros(5, 7)}
            dcp.load(state, checkpoint_id=folder)
            self.assertEqual(state["t"], WHOLE)


class StorageTest(GroupTest):
    def test_metadata(self) -> None:
        with self.group(), self.shared_folder() as folder:
            rows = distribute_tensor(WHOLE, init_device_mesh("cpu", (4,)), [Shard(0)])
            dcp.save({"rows": rows, "whole": WHOLE, "text": "text"}, checkpoint_id=folder)
            found = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
            self.assertEqual(sorted(found), ["rows", "text", "whole"])
            self.assertIsInstance(found["text"], dcp.BytesStorageMetadata)
            self.assertEqual(found["rows"].size, torch.Size([5, 7]))
            self.assertEqual(found["rows"].properties.dtype, torch.float32)
            chunks = sorted((*c.offsets, *c.sizes) for c in found["rows"].chunks if c.sizes[0])
            self.assertEqual(chunks, [(0, 0, 2, 7), (2, 0, 2, 7), (4, 0, 1, 7)])
            self.assertEqual([tuple(c.sizes) for c in found["whole"].chunks], [(5, 7)])

    @parametrize("lowest", [False, True])
    def test_replicas_are_written_once(self, lowest: bool) -> None:
        with self.group(), self.shared_folder() as folder:
            planner = dcp.DefaultSavePlanner(dedup_save_to_lowest_rank=lowest)
            state = {str(at): WHOLE + at for at in range(8)}
            dcp.save(state, checkpoint_id=folder, planner=planner)
            places = dcp.FileSystemReader(folder).read_metadata().storage_data.values()
            self.assertEqual(len(places), 8)
            files = {place.relative_path for place in places}
            self.assertEqual(len(files), 1 if lowest else 4)

    def test_a_file_for_each_tensor(self) -> None:
        with self.group(), self.shared_folder() as folder:
            writer = dcp.FileSystemWriter(folder, single_file_per_rank=False, thread_count=2)
            saved = {f"{at} of {self.rank}": WHOLE + at for at in range(3)}
            dcp.save(saved, storage_writer=writer)
            self.assertEqual(len(list(Path(folder).glob("*.distcp"))), 3 * self.world_size)
            state = {name: torch.zeros(5, 7) for name in saved}
            dcp.load(state, storage_reader=dcp.FileSystemReader(folder))
            self.assertEqual(state, saved)

    def test_written_over(self) -> None:
        with self.group(), self.shared_folder() as folder:
            for value in (1.0, 2.0):
                dcp.save({"t": torch.full((4,), value)}, checkpoint_id=folder)
            state = {"t": torch.zeros(4)}
            dcp.load(state, checkpoint_id=folder)
            self.assertEqual(state["t"], torch.full((4,), 2.0))

    def test_not_written_over(self) -> None:
        with self.group(), self.shared_folder() as folder:
            dcp.save({"t": WHOLE}, checkpoint_id=folder)
            dist.barrier()
            writer = dcp.FileSystemWriter(folder, overwrite=False)
            with self.assertRaisesRegex(dcp.CheckpointException, "overwrite"):
                dcp.save({"t": WHOLE + 1}, storage_writer=writer)

    def test_several_checkpoints(self) -> None:
        with self.group(), self.shared_folder() as folder:
            for step in range(3):
                dcp.save({"t": WHOLE * step}, checkpoint_id=f"{folder}/{step}")
            for step in range(3):
                state = {"t": torch.zeros(5, 7)}
                dcp.load(state, checkpoint_id=Path(folder) / str(step))
                self.assertEqual(state["t"], WHOLE * step)

    def test_each_rank_by_itself(self) -> None:
        with self.group(), self.shared_folder() as folder:
            mine = f"{folder}/{self.rank}"
            dcp.save({"t": WHOLE + self.rank}, checkpoint_id=mine, no_dist=True)
            state = {"t": torch.zeros(5, 7)}
            dcp.load(state, checkpoint_id=mine, no_dist=True)
            self.assertEqual(state["t"], WHOLE + self.rank)

    def test_a_group_of_two(self) -> None:
        with self.group(), self.shared_folder() as folder:
            pair = dist.new_group([0, 1])
            if self.rank < 2:
                saved = {f"of {self.rank}": WHOLE + self.rank}
                dcp.save(saved, checkpoint_id=folder, process_group=pair)
            dist.barrier()
            state = {"of 0": torch.zeros(5, 7), "of 1": torch.zeros(5, 7)}
            dcp.load(state, checkpoint_id=folder)
            self.assertEqual(state, {"of 0": WHOLE, "of 1": WHOLE + 1})

    def test_failure_of_one_rank(self) -> None:
        class Failing(dcp.FileSystemWriter):
            def write_data(writer, *args: Any) -> Any:  # noqa: N805
                if self.rank == 2:
                    raise OSError("no space")
                return super().write_data(*args)

        with self.group(), self.shared_folder() as folder:
            with self.assertRaises(dcp.CheckpointException) as caught:
                dcp.save({f"of {self.rank}": WHOLE}, storage_writer=Failing(folder))
            failures = caught.exception.failures
            self.assertEqual({at: str(why[0]) for at, why in failures.items()}, {2: "no space"})

    def test_to_torch_save_and_back(self) -> None:
        with self.group(), self.shared_folder() as folder:
            rows = distribute_tensor(WHOLE, init_device_mesh("cpu", (4,)), [Shard(0)])
            dcp.save({"nested": {"rows": rows}, "n": 3}, checkpoint_id=f"{folder}/sharded")
            if self.rank == 0:
                dcp_to_torch_save(f"{folder}/sharded", f"{folder}/whole.pt")
                state = torch.load(f"{folder}/whole.pt")
                self.assertEqual(state, {"nested": {"rows": WHOLE}, "n": 3})
                torch_save_to_dcp(f"{folder}/whole.pt", f"{folder}/again")
            dist.barrier()
            state = {"nested": {"rows": torch.zeros(5, 7)}, "n": 0}
            dcp.load(state, checkpoint_id=f"{folder}/again")
            self.assertEqual(state, {"nested": {"rows": WHOLE}, "n": 3})


class Renaming(dcp.DefaultSavePlanner):
    """Saves everything under another name."""

    def set_up_planner(
        self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False
    ) -> None:
        renamed = {f"new {name}": value for name, value in state_dict.items()}
        super().set_up_planner(renamed, storage_meta, is_coordinator)


class Doubling(dcp.DefaultSavePlanner):
    """Saves twice of everything."""

    def resolve_data(self, write_item: Any) -> Any:
        return super().resolve_data(write_item) * 2


class Adding(dcp.DefaultLoadPlanner):
    """Adds one to all that it loads."""

    def commit_tensor(self, read_item: Any, tensor: Any) -> None:
        tensor.add_(1)


class PlannersTest(GroupTest):
    def test_other_names(self) -> None:
        with self.group(), self.shared_folder() as folder:
            dcp.save({"t": WHOLE}, checkpoint_id=folder, planner=Renaming())
            state = {"new t": torch.zeros(5, 7)}
            dcp.load(state, checkpoint_id=folder)
            self.assertEqual(state, {"new t": WHOLE})

    def test_other_values(self) -> None:
        with self.group(), self.shared_folder() as folder:
            rows = distribute_tensor(WHOLE, init_device_mesh("cpu", (4,)), [Shard(0)])
            dcp.save({"t": rows}, checkpoint_id=folder, planner=Doubling())
            self.assertEqual(rows.full_tensor(), WHOLE)
            state = {"t": torch.zeros(5, 7)}
            dcp.load(state, checkpoint_id=folder)
            self.assertEqual(state["t"], WHOLE * 2)

    def test_changed_when_loaded(self) -> None:
        with self.group(), self.shared_folder() as folder:
            dcp.save({"t": WHOLE}, checkpoint_id=folder)
            state = {"t": distribute_tensor(WHOLE, init_device_mesh("cpu", (4,)), [Shard(0)])}
            dcp.load(state, checkpoint_id=folder, planner=Adding())
            self.assertEqual(state["t"].full_tensor(), WHOLE + 1)

    def test_without_flattening(self) -> None:
        with self.group(), self.shared_folder() as folder:
            planner = dcp.DefaultSavePlanner(flatten_state_dict=False)
            dcp.save({"a": {"b": 3}}, checkpoint_id=folder, planner=planner)
            found = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
            self.assertEqual(list(found), ["a"])

    def test_kept_plans(self) -> None:
        with self.group(), self.shared_folder() as folder:
            for step in range(3):
                planner = dcp.DefaultSavePlanner(enable_plan_caching=True)
                saved = {f"of {self.rank}": WHOLE + step, "all": WHOLE * step}
                dcp.save(saved, checkpoint_id=f"{folder}/{step}", planner=planner)
                state = {name: torch.zeros(5, 7) for name in saved}
                dcp.load(state, checkpoint_id=f"{folder}/{step}")
                self.assertEqual(state, saved)


instantiate_parametrized_tests(TensorsTest)
instantiate_parametrized_tests(StorageTest)
