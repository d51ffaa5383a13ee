"""torch's own 285 gloo tests, on reused workers. ``test.conformance`` sets the environment."""

from torch.testing._internal.distributed.distributed_test import DistributedTest, TestDistBackend

from torchcontinuous import ContinuousMixin


class TestDistBackendWithSpawn(ContinuousMixin, TestDistBackend, DistributedTest._DistTestBase):
    def setUp(self):
        super().setUp()
        self._spawn_processes()
