"""torch's own 436 TensorPipe RPC tests as they stand, for the runners that need no edit."""

from torch.testing._internal.distributed import rpc_utils
from torch.testing._internal.distributed.rpc.tensorpipe_rpc_agent_test_fixture import (
    TensorPipeRpcAgentTestFixture,
)

globals().update(
    rpc_utils.generate_tests(
        "TensorPipe",
        TensorPipeRpcAgentTestFixture,
        rpc_utils.GENERIC_TESTS + rpc_utils.TENSORPIPE_TESTS,
        __name__,
    )
)
