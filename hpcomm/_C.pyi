"""Types of the native module; kept by hand beside csrc/torch/bind_*.cpp, tests/test_package.py compares the names.

One file a subject, _C_*.pyi, that only type checkers read: there are no such modules at run time.
"""

from hpcomm._C_comm import (
    Communicator as Communicator,
)
from hpcomm._C_comm import (
    CommunicatorConfig as CommunicatorConfig,
)
from hpcomm._C_comm import (
    Control as Control,
)
from hpcomm._C_comm import (
    ControlListener as ControlListener,
)
from hpcomm._C_comm import (
    Event as Event,
)
from hpcomm._C_comm import (
    Neighbourhood as Neighbourhood,
)
from hpcomm._C_comm import (
    Stream as Stream,
)
from hpcomm._C_comm import (
    Work as Work,
)
from hpcomm._C_comm import (
    built_with_cuda as built_with_cuda,
)
from hpcomm._C_comm import (
    c10d_communicator as c10d_communicator,
)
from hpcomm._C_comm import (
    check_lost_operations as check_lost_operations,
)
from hpcomm._C_comm import (
    emulated_communicator as emulated_communicator,
)
from hpcomm._C_comm import (
    hierarchical_communicator as hierarchical_communicator,
)
from hpcomm._C_comm import (
    lose_operations as lose_operations,
)
from hpcomm._C_comm import (
    nccl_communicator as nccl_communicator,
)
from hpcomm._C_comm import (
    nccl_version as nccl_version,
)
from hpcomm._C_comm import (
    near_control as near_control,
)
from hpcomm._C_comm import (
    neighbourhood_of as neighbourhood_of,
)
from hpcomm._C_comm import (
    shm_communicator as shm_communicator,
)
from hpcomm._C_comm import (
    solo_communicator as solo_communicator,
)
from hpcomm._C_comm import (
    solo_control as solo_control,
)
from hpcomm._C_comm import (
    tell_long_waits as tell_long_waits,
)
from hpcomm._C_engine import (
    Backend as Backend,
)
from hpcomm._C_engine import (
    BackendJob as BackendJob,
)
from hpcomm._C_engine import (
    BackendOptions as BackendOptions,
)
from hpcomm._C_engine import (
    BucketPlan as BucketPlan,
)
from hpcomm._C_engine import (
    CopyList as CopyList,
)
from hpcomm._C_engine import (
    DdpReducer as DdpReducer,
)
from hpcomm._C_engine import (
    Deferred as Deferred,
)
from hpcomm._C_engine import (
    Layout as Layout,
)
from hpcomm._C_engine import (
    ReadyHooks as ReadyHooks,
)
from hpcomm._C_engine import (
    Receipt as Receipt,
)
from hpcomm._C_engine import (
    RecvEdge as RecvEdge,
)
from hpcomm._C_engine import (
    Reducer as Reducer,
)
from hpcomm._C_engine import (
    SendEdge as SendEdge,
)
from hpcomm._C_engine import (
    StepLoss as StepLoss,
)
from hpcomm._C_engine import (
    are_held_elsewhere as are_held_elsewhere,
)
from hpcomm._C_engine import (
    backend as backend,
)
from hpcomm._C_engine import (
    backend_beside as backend_beside,
)
from hpcomm._C_engine import (
    bucket_bytes as bucket_bytes,
)
from hpcomm._C_engine import (
    count_collectives as count_collectives,
)
from hpcomm._C_engine import (
    ddp_bucket_plan as ddp_bucket_plan,
)
from hpcomm._C_engine import (
    flatten as flatten,
)
from hpcomm._C_engine import (
    lane_backend as lane_backend,
)
from hpcomm._C_engine import (
    named_group as named_group,
)
from hpcomm._C_engine import (
    own_gradients as own_gradients,
)
from hpcomm._C_engine import (
    pack as pack,
)
from hpcomm._C_engine import (
    part_gradients as part_gradients,
)
from hpcomm._C_engine import (
    register_ddp_hook as register_ddp_hook,
)
from hpcomm._C_engine import (
    release_bucket_memory as release_bucket_memory,
)
from hpcomm._C_engine import (
    require_wire_dtype as require_wire_dtype,
)
from hpcomm._C_engine import (
    unflatten as unflatten,
)
from hpcomm._C_engine import (
    unpack as unpack,
)
from hpcomm._C_plan import (
    Action as Action,
)
from hpcomm._C_plan import (
    ActionKind as ActionKind,
)
from hpcomm._C_plan import (
    CommunicatorSpec as CommunicatorSpec,
)
from hpcomm._C_plan import (
    CompileSpec as CompileSpec,
)
from hpcomm._C_plan import (
    CostModel as CostModel,
)
from hpcomm._C_plan import (
    Issue as Issue,
)
from hpcomm._C_plan import (
    Lane as Lane,
)
from hpcomm._C_plan import (
    Operation as Operation,
)
from hpcomm._C_plan import (
    OpKind as OpKind,
)
from hpcomm._C_plan import (
    Payload as Payload,
)
from hpcomm._C_plan import (
    RankTimes as RankTimes,
)
from hpcomm._C_plan import (
    ReducePolicy as ReducePolicy,
)
from hpcomm._C_plan import (
    Schema as Schema,
)
from hpcomm._C_plan import (
    StageCost as StageCost,
)
from hpcomm._C_plan import (
    StartOrder as StartOrder,
)
from hpcomm._C_plan import (
    StepPlan as StepPlan,
)
from hpcomm._C_plan import (
    Tie as Tie,
)
from hpcomm._C_plan import (
    Timeline as Timeline,
)
from hpcomm._C_plan import (
    VerifyResult as VerifyResult,
)
from hpcomm._C_plan import (
    compile_plan as compile_plan,
)
from hpcomm._C_plan import (
    put_off as put_off,
)
