"""torch's own 436 TensorPipe RPC tests, on reused workers."""

from torch.testing._internal.distributed import rpc_utils
from torch.testing._internal.distributed.rpc.tensorpipe_rpc_agent_test_fixture import (
    TensorPipeRpcAgentTestFixture,
)

from torchcontinuous import ContinuousMixin

_stock = rpc_utils.generate_tests(
    "TensorPipe",
    TensorPipeRpcAgentTestFixture,
    rpc_utils.GENERIC_TESTS + rpc_utils.TENSORPIPE_TESTS,
    __name__,
)
for _name, _class in _stock.items():
    globals()[_name] = type(_name, (ContinuousMixin, _class), {"__module__": __name__})
del _class
