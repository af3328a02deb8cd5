"""One sequence on many processes: masks as data, exact attention across processes, plans that balance work.

    mesh      who the processes are: dp_replicate x dp_shard x cp x sp
    kinds     what a token may see; layout: the tokens of a batch and their mask; shards: who holds which
    ulysses   exchange tokens for heads (axis sp); context: gather keys and values (axis cp)
    blocks    the mask of flex attention; traffic: the messages, with gradients and a count of bytes
    planner   who computes what, from lengths alone

Only `worldmodel.models.layers.attention` and the trainer need to know that a sequence is shared.
"""
