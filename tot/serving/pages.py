"""The live page: the viewer of `tot report`, whose data arrives as server-sent events. Its URL has a random token.

The id of an event is a revision of the tree, so a page that reconnects gets the changes after the last event it has.
"""

from __future__ import annotations

import asyncio
import hmac
import secrets
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Header, HTTPException
from starlette.responses import HTMLResponse, Response, StreamingResponse

from tot.decoders.serving.app import guarded
from tot.decoders.serving.server import Server, address_of, listen
from tot.report.page import embedded, page
from tot.serving.live import LiveSearch, LiveSearches

_PAUSE = 0.25
"""Seconds between updates, or up to `_LONGEST` if an update takes long: updates take about 5% of the time."""
_LONGEST = 2.0
_HEADERS = {
    "cache-control": "no-store",
    "content-security-policy": "frame-ancestors 'none'",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}


class Pages:
    """The page of some searches. `router` has its routes, below `path`."""

    def __init__(self, runs: LiveSearches, title: str, closed: Callable[[], bool]) -> None:
        """The streams of events end when `closed` returns true."""
        self._runs = runs
        self._token = secrets.token_urlsafe(16)
        self._closed = closed
        self._page = "".join(page(title, [("live", {"title": title})], live=True))
        self.path = f"/live/{self._token}/"
        self.router = APIRouter(prefix="/live/{token}", dependencies=[Depends(self._check)])
        self.router.get("/")(self._show)
        self.router.get("/events")(self._events)
        self.router.post("/runs/{run}/stop")(self._stop)

    def _check(self, token: str) -> None:
        if not hmac.compare_digest(token.encode(), self._token.encode()):
            raise HTTPException(404)

    async def _show(self) -> Response:
        return HTMLResponse(self._page, headers=_HEADERS)

    async def _events(self, run: str = "", last_event_id: Annotated[int, Header()] = 0) -> Response:
        self._runs.follow()
        events = self._follow(self._run(run) if run else None, last_event_id)
        return StreamingResponse(events, media_type="text/event-stream", headers=_HEADERS)

    async def _stop(self, run: str) -> Response:
        self._run(run).stop()
        return Response(status_code=204)

    def _run(self, run: str) -> LiveSearch:
        try:
            return self._runs[run]
        except KeyError:
            raise HTTPException(404) from None

    async def _follow(self, run: LiveSearch | None, seen: int) -> AsyncIterator[str]:
        """Yield the changes of a search after a revision, then its result; or the list of all searches, without end."""
        status: Any = None
        yield "retry: 1000\n\n"  # milliseconds until a page reconnects
        while True:
            closed, began = self._closed(), time.monotonic()
            ended = None if run is None else run.ended  # before the scan, which finds the last changes
            if run is not None and run.revisions is not None:
                run.revisions.scan()
            pause = min(max(_PAUSE, 20 * (time.monotonic() - began)), _LONGEST)
            while run is not None and run.revisions is not None and (patch := run.revisions.since(seen)) is not None:
                seen = patch[0]
                yield _event("tree", patch[1], f"id: {seen}\n")
            if (now := self._runs.statuses if run is None else run.status) != status:
                status = now
                yield _event("status", status)
            if ended is not None:
                yield _event("end", ended)
            if closed or ended is not None:
                return
            await asyncio.sleep(pause)


def _event(name: str, data: Any, identity: str = "") -> str:
    return f"{identity}event: {name}\ndata: {embedded(data)}\n\n"


@contextmanager
def served(runs: LiveSearches, title: str) -> Iterator[str]:
    """Serve the page on a free loopback port, and yield its URL. At the end, open pages get the last events."""
    api = guarded()
    server = Server(api)
    pages = Pages(runs, title, lambda: server.should_exit)
    api.include_router(pages.router)
    with listen("127.0.0.1", 0) as listening:
        thread = threading.Thread(target=server.run, args=([listening],), name="tot-live", daemon=True)
        thread.start()
        try:
            yield address_of(listening) + pages.path
        finally:
            server.should_exit = True
            thread.join()
