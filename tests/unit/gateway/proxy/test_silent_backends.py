"""Engines that say nothing any more are reported until they answer again."""

import asyncio

import aiohttp
import pytest

from gateway.proxy.config import BackendHealth
from tests.unit.gateway.proxy.health_reports import answer_after, ask, collected_reports, next_report
from tests.unit.gateway.proxy.running_proxy import (
    DONE_EVENT,
    GatedEngine,
    ProxyProcess,
    fake_engine,
    post_chat,
)


@pytest.mark.interpreted
async def test_engine_that_falls_silent_within_a_stream_is_reported_until_it_goes_on(
    impatient_proxy: ProxyProcess, http: aiohttp.ClientSession
) -> None:
    gated = GatedEngine()
    async with collected_reports(impatient_proxy) as reports, fake_engine(gated, "silent") as backend:
        url = await impatient_proxy.serve(backend)
        async with post_chat(http, url) as stream:
            for _ in range(3):
                gated.release(b"data: {}\n\n")
                await stream.content.readuntil(b"\n\n")
            suspect = await next_report(reports)
            assert (suspect.uid, suspect.suspect, suspect.reason) == ("silent", True, "Silent")
            assert suspect.message.startswith("no data for ")
            gated.release(b"data: {}\n\n")
            assert await next_report(reports) == BackendHealth("silent")
            gated.end()
            assert (await stream.read()).endswith(DONE_EVENT)


@pytest.mark.interpreted
async def test_engine_that_hangs_at_its_first_request_is_reported(
    impatient_proxy: ProxyProcess, http: aiohttp.ClientSession
) -> None:
    answers = asyncio.Event()
    async with collected_reports(impatient_proxy) as reports, fake_engine(answer_after(answers), "mute") as backend:
        url = await impatient_proxy.serve(backend)
        answers.set()
        assert await ask(http, url, "0", path="/v1/messages/count_tokens") == 200, "which sets no measure for an answer"
        answers.clear()
        asking = asyncio.create_task(ask(http, url, "1"))
        suspect = await next_report(reports)
        assert (suspect.uid, suspect.reason) == ("mute", "Slow")
        assert suspect.message.endswith("and none before")
        answers.set()
        assert await next_report(reports) == BackendHealth("mute")
        assert await asking == 200
