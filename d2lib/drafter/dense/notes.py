"""What an exported adapter's page says of this family."""

from d2lib.drafter.family import ExportNotes

NOTES = ExportNotes(
    adapter="""`peft.PeftModel.from_pretrained(drafter, FOLDER)` adapts a module tree that has Linear modules under the
names of the trainers and servers (`fc`, `layers.0.self_attn.q_proj`, …). The scale is lora_alpha / r = 1. Modules are
named by their last part, as servers want it: PEFT then wraps a gated Markov head's `gate_proj` as well, for which the
folder has no tensors and whose update stays zero. k_proj and v_proj adapt context rows and slot rows alike. The base
must be the native drafter named above, not a quantised one.""",
    merged="""Every tensor is W + B · A in fp32 and replaces the tensor of that name, rounded once to the type that
it is stored in. All other tensors stay the native drafter's. Servers that merge no draft adapter need this.""",
    adapted="`fc`, and every layer's attention and MLP projections. Embedding, LM head, norms, biases, Markov and "
    "confidence heads are the base's own and not in here.",
)
