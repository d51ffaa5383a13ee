"""Meshes that outlive their test: those that stand for groups cost the worker."""

import pytest
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from torchcontinuous._meshes import Meshes


@pytest.fixture
def meshes(monkeypatch):
    monkeypatch.setattr(DeviceMesh, "__init__", DeviceMesh.__init__)  # Put back what install does.
    dist.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
    noted = Meshes()
    noted.install()
    yield noted
    dist.destroy_process_group()


def test_a_mesh_that_is_kept(meshes):
    kept = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    assert meshes.made_any
    assert "keeps DeviceMesh" in meshes.settle()
    assert kept is not None
    assert not meshes.made_any
    init_device_mesh("cpu", (4,))
    assert meshes.settle() is None


def test_a_part_of_a_mesh_that_is_kept(meshes):
    part = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))["a"]
    assert "keeps DeviceMesh" in meshes.settle()
    assert part is not None


def test_a_mesh_without_groups_may_be_kept(meshes):
    """As DTensor does, to try operators on."""
    bare = DeviceMesh("cpu", [0], _init_backend=False, _rank=0)
    assert meshes.settle() is None
    assert bare is not None


def test_the_classs_own_meshes_may_be_kept(meshes):
    kept = init_device_mesh("cpu", (4,))
    meshes.keep_those_there()
    assert meshes.settle() is None
    assert kept is not None
