"""Search algorithms over trees of thoughts."""

from tot.search.ab_mcts import ABMCTS
from tot.search.base import Search
from tot.search.baselines import Act, BestOfN, ChainOfThought
from tot.search.best_first import BestFirst
from tot.search.bfs import BFS
from tot.search.dfs import DFS
from tot.search.halving import SequentialHalving
from tot.search.mcts import MCTS
from tot.search.refine import Refine
from tot.search.self_consistency import SelfConsistency

__all__ = [
    "ABMCTS",
    "BFS",
    "DFS",
    "MCTS",
    "Act",
    "BestFirst",
    "BestOfN",
    "ChainOfThought",
    "Refine",
    "Search",
    "SelfConsistency",
    "SequentialHalving",
]
