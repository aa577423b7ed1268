"""What an exported adapter's page says of this family."""

from d2lib.drafter.family import ExportNotes

_WO_A = """`wo_a` is grouped: its weight is [o_groups · o_lora_rank, heads · head_dim / o_groups], and rows
g · o_lora_rank … (g+1) · o_lora_rank - 1 see only the channels x_g of head group g. So does the adapter: A is shared by
the groups, B's rows belong to them, and y_g = x_g · W_gᵀ + (x_g · Aᵀ) · B_gᵀ = x_g · (W_g + B_g · A)ᵀ. Row by row that
is the standard merge W + B · A of the whole matrix; a PEFT Linear of this shape, called with x_g and cut to the rows of
g, gives the same. A stack that multiplies by `wo_a.weight` itself (a view by groups and an einsum, say) never calls the
Linear, so PEFT's active adapter would be passed over without an error: merge there."""

NOTES = ExportNotes(
    adapter=f"""`peft.PeftModel.from_pretrained(drafter, FOLDER)` adapts a module tree that has Linear modules
under the release's names, with or without a prefix (`mtp.0.attn.wq_a`, …). The scale is lora_alpha / r = 1. The base
must be the native drafter named above, dequantised: added to FP8 codes, the update would be rounded to their grid.

{_WO_A}""",
    merged="""Every tensor is W + B · A in fp32 under the release's name and replaces the tensor of that
name, with its scale (`.scale`) where the release stores FP8. All other tensors stay the native drafter's. `wo_a` is
grouped; its adapter shares A among the groups and B's rows belong to them, so that the merge by rows is the standard
one of the whole matrix.""",
    adapted="`main_proj` and every stage's attention projections and shared expert. Embedding, LM head, routed "
    "experts, norms, router, hyper-connections, Markov and confidence heads are the base's own and not in here.",
)
