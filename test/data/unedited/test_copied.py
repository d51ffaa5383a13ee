"""A suite on a copied harness."""

import unittest

import torch
import torch.distributed as dist
from copied import CopiedTestCase


class TestCopied(CopiedTestCase):
    def setUp(self):
        super().setUp()
        self._spawn_processes()

    def test_fails(self):
        self.assertEqual(self.rank, 0)

    def test_skips(self):
        raise unittest.SkipTest("not here")

    def test_sum(self):
        store = dist.FileStore(self.file_name, 2)
        dist.init_process_group("gloo", rank=self.rank, world_size=2, store=store)
        tensor = torch.ones(1)
        dist.all_reduce(tensor)
        self.assertEqual(tensor.item(), 2)
