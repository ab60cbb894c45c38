"""A headless Chromium for reports: every page is watched for errors and for requests to any place but its own file."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

CHROMIUM = os.environ.get("CHROMIUM", "chromium")


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    # These tests run only where they are asked for: what is missing fails them, it does not skip them.
    from playwright.sync_api import sync_playwright

    path = shutil.which(CHROMIUM)
    assert path, f"no {CHROMIUM}: make test-browser installs it"
    with sync_playwright() as playwright:
        found = playwright.chromium.launch(
            executable_path=path, args=["--no-sandbox", "--disable-background-networking", "--disable-component-update"]
        )
        yield found
        found.close()


@pytest.fixture
def opened(browser: Any, tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """Opens a result, or a file that is there already, in a page of its own."""
    pages, said, asked, alerts = [], [], [], []

    def open_page(result: Any, *, scripts: bool = True, **options: Any) -> Any:
        path = result if isinstance(result, Path) else result.to_html(tmp_path / f"{len(pages)}.html")
        size = {"width": 1280, "height": 900}
        context = browser.new_context(java_script_enabled=scripts, viewport=size, **options)
        context.set_default_timeout(15_000)
        page = context.new_page()
        page.on("console", lambda message: said.append(message.text))
        page.on("pageerror", lambda error: said.append(str(error)))
        page.on("request", lambda request: asked.append(request.url))
        page.on("websocket", lambda socket: asked.append(socket.url))
        page.on("dialog", lambda dialog: (alerts.append(dialog.message), dialog.dismiss()))
        page.goto(path.as_uri())
        pages.append(page)
        return page

    yield open_page
    urls = {page.url for page in pages}
    for page in pages:
        page.context.close()
    assert not said and not alerts
    assert {u for u in asked if not u.startswith(("data:", "blob:"))} <= urls
