"""Types of hpcomm/_build.py, which setup.py writes at build time."""

TORCH_VERSION: str
TORCH_CUDA: str
PYTHON: str
USE_CUDA: bool
CUDA_VERSION: str
CUDA_ARCHITECTURES: str
CXX: str
REVISION: str
