"""Checkpoints: training state in memory and in storage, complete or absent, verified before it is used.

    state      what must survive together            tree       a state taken apart into a header and tensors
    arena      the memory tier                       saving     one snapshot to storage; `writer` does it in a thread
    vault      checkpoints in a storage              storage    a folder, or anything that fsspec reaches
    manager    CheckpointManager                     distributed  DistributedCheckpointManager, the lab's form
    restoring  back into a live state                resharding   for another number of ranks
    interval   how often                             oldform    files of the old form
"""
