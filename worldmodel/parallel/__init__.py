"""Sequence parallelism: masks as data, exact attention across processes, and balanced partitions.

    mesh         the processes: dp_replicate x dp_shard x cp x sp
    mask_rules   kinds of tokens and their attention rules
    layout       the tokens of a batch and their mask
    shards       the tokens of each process
    ulysses      the heads of each process (axis sp)
    head_exchange  exchange tokens for heads, in groups, while others are attended to
    context      gather keys and values (axis cp)
    flex_mask    the block mask of flex attention
    collectives  all-to-all and all-gather with gradients and byte counts; all-reduce
    planner      balanced partitions, computed from lengths
    tensor_parallel  layers divided by heads and channels, for inference

Only `worldmodel.models.layers.attention` and the trainer depend on whether a sequence is shared.
"""
