"""Sequence parallelism: masks as data, exact attention across processes, and balanced partitions.

    mesh         the processes: dp_replicate x dp_shard x cp x sp
    mask_rules   kinds of tokens and their attention rules
    layout       the tokens of a batch and their mask
    shards       the tokens of each process
    ulysses      exchange tokens for heads (axis sp)
    context      gather keys and values (axis cp)
    flex_mask    the block mask of flex attention
    collectives  all-to-all and all-gather with gradients and byte counts
    planner      balanced partitions, computed from lengths

Only `worldmodel.models.layers.attention` and the trainer depend on whether a sequence is shared.
"""
