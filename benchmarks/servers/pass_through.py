"""The floor of `benchmarks.proxy`: the least that an aiohttp proxy does, which is to pass request and response on."""

import asyncio
import sys

import aiohttp
from aiohttp import web


async def _serve(upstream: str) -> None:
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0, force_close=True)) as session:

        async def forward(request: web.BaseRequest) -> web.StreamResponse:
            async with session.post(upstream + request.path, data=await request.read()) as answer:
                response = web.StreamResponse(headers={"Content-Type": answer.content_type})
                await response.prepare(request)
                async for chunk in answer.content.iter_any():
                    await response.write(chunk)
                await response.write_eof()
                return response

        runner = web.ServerRunner(web.Server(forward, access_log=None))
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        print(site.port, flush=True)
        await asyncio.to_thread(sys.stdin.read)


if __name__ == "__main__":
    asyncio.run(_serve(sys.argv[1]))
