"""What each parameter of the network is to the optimizer.

Per-head Muon follows the K3 report's reading: the projections whose rows are heads (KDA's q, k and v, MLA's q and kv_b) are
orthogonalised head by head, every other matrix whole, and expert stacks expert by expert.
"""

from torch import nn

from perilune.model.attention_residuals import AttentionResidual
from perilune.model.decoder import Decoder
from perilune.model.gated_mla import GatedMLA
from perilune.model.kda_attention import KDAAttention
from perilune.model.norm import RMSNorm
from perilune.train.optimizer import ParameterRole

_KDA_HEADS = ("q_proj.weight", "k_proj.weight", "v_proj.weight")
_MLA_HEADS = ("q_proj.weight", "q_b_proj.weight", "kv_b_proj.weight")
# The decay of A_log and dt_bias would pull every retention towards one value (K3 report, appendix on initialisation).
_NO_DECAY = ("A_log", "dt_bias")


def parameter_roles(model: Decoder) -> dict[str, ParameterRole]:
    """A role for every parameter that requires gradients, by its name in `model.named_parameters()`."""
    heads = dict(_head_counts(model))
    undecayed = {
        f"{name}.{parameter}"
        for name, module in model.named_modules()
        if isinstance(module, RMSNorm | AttentionResidual)
        for parameter, _ in module.named_parameters()
    }
    roles: dict[str, ParameterRole] = {}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        if name.startswith(("embed_tokens", "lm_head")):
            roles[name] = ParameterRole("embedding")
        elif name in undecayed or name.endswith(_NO_DECAY):
            roles[name] = ParameterRole("vector", weight_decay=False)
        elif parameter.ndim < 2 or name.endswith("_conv"):
            roles[name] = ParameterRole("vector")
        else:
            roles[name] = ParameterRole("matrix", heads=heads.get(name))
    return roles


def _head_counts(model: nn.Module) -> list[tuple[str, int]]:
    counts = []
    for name, module in model.named_modules():
        if isinstance(module, KDAAttention):
            counts += [(f"{name}.{matrix}", module.heads) for matrix in _KDA_HEADS]
        elif isinstance(module, GatedMLA):
            counts += [(f"{name}.{matrix}", module.heads) for matrix in _MLA_HEADS]
    return counts
