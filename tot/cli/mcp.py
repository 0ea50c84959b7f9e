"""`tot mcp`: serve searches to MCP clients (editors, agents) over standard input and output, as the tool `solve`."""

import time
from contextlib import aclosing
from importlib.metadata import version
from signal import SIG_DFL, SIGINT, signal
from typing import Annotated, Any, Literal, TypedDict

import typer

from tot.api import SearchFinished, astream
from tot.cli.flags import takes
from tot.config import ModelFlags, SearchConfig
from tot.decoders.errors import OptionError, TotError
from tot.decoders.models.model_names import find_model
from tot.registry import TASKS


class Solved(TypedDict):
    answer: Any
    certainty: float | None
    solved: bool
    thoughts: int
    seconds: float


@takes(ModelFlags, SearchConfig)
def mcp_command(
    *, task: Annotated[str, typer.Argument(help="The task of questions without one.")] = "ask", given: dict[str, Any]
) -> None:
    """Serve searches to an MCP client over standard input and output, as the tool `solve`."""
    try:
        from mcp.server.mcpserver import Context, MCPServer
        from mcp.server.mcpserver.exceptions import ToolError
    except ModuleNotFoundError:
        raise OptionError("tot mcp needs mcp: pip install mcp") from None
    config, default = SearchConfig.of(None, given), task
    server = MCPServer("tot", version=version("tot"), log_level="WARNING")
    config.parts(config.suited(default))
    for model in config.model.weights.values():
        find_model(model)
    others = (name for name in TASKS if name != "optimize")  # a client can't name a file to run
    known: Any = Literal[*dict.fromkeys((default, *others))]

    @server.tool()
    async def solve(question: str, context: Context, task: known | None = default) -> Solved:
        """Answer a question by a search over thoughts. The certainty is the probability that the answer is right."""
        started, thoughts = time.monotonic(), -1
        try:
            async with aclosing(astream(task or default, question, config)) as events:
                async for event in events:
                    if thoughts < (thoughts := len(event.tree) - 1):  # progress must increase
                        await context.report_progress(thoughts, message=f"{thoughts} thoughts")
        except TotError as error:
            raise ToolError(str(error)) from None
        assert isinstance(event, SearchFinished)
        found, seconds = event.solution, time.monotonic() - started
        return Solved(
            answer=found.answer, certainty=found.certainty, solved=found.solved, thoughts=thoughts, seconds=seconds
        )

    signal(SIGINT, SIG_DFL)  # a thread that waits for standard input would delay KeyboardInterrupt
    server.run("stdio")
