"""How decode that chooses pages divides a context, and how much of it it reads."""

from dataclasses import dataclass, replace
from typing import Literal

PageEstimator = Literal["codes", "bounds"]


@dataclass(frozen=True, slots=True)
class PageBudget:
    """How much of a context a KV head attends to, in pages of `page_size` tokens."""

    page_size: int
    num_pages: int
    """Pages that a step attends to, at most."""
    num_recent: int
    """Newest pages that are always among them, as the first page is."""
    num_dense: int = 0
    """Pages of a context up to which all are attended to."""
    num_ahead: int = 0
    """Pages, beside those always chosen, that are fetched before a layer's query is known."""
    estimator: PageEstimator = "codes"
    """What is known of keys: 2 bits of each channel, or only the bounds of their pages."""

    def ahead(self) -> "PageBudget":
        """Return the budget of what is fetched before a layer's query is known."""
        num_pages = min(self.num_pages, 1 + self.num_recent + self.num_ahead)
        return replace(self, num_pages=num_pages, num_dense=0)

    def num_chosen(self, max_pages: int) -> int:
        """Return the most pages that a step attends to where contexts have up to `max_pages`."""
        from nanovllm.ops.pages import num_entries  # with torch, and options are read without

        return num_entries(min(self.num_pages, max_pages), self.num_dense, max_pages)
