"""PyTorch's own test suite for torch.distributed backends, with gloo and with hpcomm side by side.

    PYTHONPATH=.:tests python -m peer --world-sizes 2,3,4 --markdown peer.md

``torch.testing._internal.distributed.distributed_test`` ships with torch: some three hundred tests that read BACKEND
and WORLD_SIZE from the environment. What runs for gloo runs for hpcomm as well; a test that passes there has to pass
here.

    __main__.py   the command: runs, compares, prints the table
    worker.py     one process per backend and world size: forks once per test, and that forks the ranks
    suite.py      the suite as a unittest class, told what hpcomm can do
"""
