"""What forespeak reads of this method before it is used. No torch here: --help must be fast."""

from forespeak.drafters.table import MethodEntry, fitting_builders
from forespeak.types import DrafterInfo

_INFO = DrafterInfo(method="bigram", expansion="forward", trained=False)

METHOD = MethodEntry(
    name="bigram",
    summary="Counts which token followed which in the text so far.",
    paper="",
    info=_INFO,
    needs="nothing",
    opens="forespeak_bigram.drafter:open_drafter",
    defaults={"num_speculative_tokens": 3, "node_budget": 8, "tree_depth": 3, "tree_top_k": 2},
    builders=fitting_builders(_INFO),
)
