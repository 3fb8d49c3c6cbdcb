"""PyTorch's own test suite for torch.distributed backends, with gloo and with hpcomm side by side.

    PYTHONPATH=.:tests python -m peer --world-sizes 2,3,4 --markdown peer.md
    PYTHONPATH=.:tests python -m peer --world-sizes 2,3 --backends gloo,ddp,ddp-stock --only-ddp --on-cpu

``torch.testing._internal.distributed.distributed_test`` ships with torch: some three hundred tests that read BACKEND
and WORLD_SIZE from the environment. What runs for gloo runs for hpcomm as well; a test that passes there has to pass
here. Besides the two backends there are two more columns, both over gloo with hpcomm.DistributedDataParallel in the
place of torch's: "ddp" as it is, "ddp-stock" with torch's Reducer under it throughout.

    __main__.py   the command: runs, compares, prints the table
    worker.py     one process per backend and world size: forks once per test, and that forks the ranks
    suite.py      the suite as a unittest class, told what hpcomm can do
    on_cpu.py     what a test that asks for GPUs gets instead
"""
