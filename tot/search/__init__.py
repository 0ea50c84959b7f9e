"""Search algorithms over trees of thoughts."""

from tot.search.base import Search
from tot.search.bfs import BFS

__all__ = ["BFS", "Search"]
