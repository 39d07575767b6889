"""Reviews are asked once for all that wait for them, and no caller keeps others waiting; time is virtual."""

import asyncio
from collections import Counter
from collections.abc import Mapping
from typing import Any

from console.access_reviews import MOST_AT_ONCE, MOST_KEPT, AccessReviews, Caller
from kube.client import Client, Obj
from kube.errors import Unreachable
from kube.resources import TOKEN_REVIEWS, Resource
from tests.support import virtual_time

REVIEW_SECONDS = 0.01
NAMESPACES = frozenset(f"team-{number}" for number in range(200))
TENANT = Caller("tenant")


class SlowReviewer(Client):
    """An API server that takes its time for each review, and grants one namespace."""

    def __init__(self) -> None:
        self.asked = Counter[str]()
        self.at_once = self.most_at_once = 0
        self.fails = False

    async def review(self, resource: Resource, spec: Mapping[str, Any]) -> Obj:
        self.asked[spec["token"] if resource is TOKEN_REVIEWS else spec["resourceAttributes"]["namespace"]] += 1
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        await asyncio.sleep(REVIEW_SECONDS)
        self.at_once -= 1
        if self.fails:
            raise Unreachable("no answer")
        if resource is TOKEN_REVIEWS:
            return {"status": {"authenticated": True, "user": {"username": spec["token"]}}}
        return {"status": {"allowed": spec["resourceAttributes"]["namespace"] == "team-7"}}


async def ask_many(reviews: AccessReviews, count: int, **caller: Any) -> list[Any]:
    callers = [TENANT._replace(**{name: value(index) for name, value in caller.items()}) for index in range(count)]
    return await asyncio.gather(
        *(reviews.find_visible(tenant, NAMESPACES) for tenant in callers), return_exceptions=True
    )


def test_requests_of_a_caller_that_wait_for_the_same_review_share_it() -> None:
    async def main() -> None:
        reviewer = SlowReviewer()
        reviews = AccessReviews(reviewer, asyncio.get_running_loop().time)
        callers = await asyncio.gather(*(reviews.identify("tenant", "10.0.0.1") for _ in range(50)))
        assert callers == [TENANT] * 50
        assert await ask_many(reviews, 100) == [frozenset({"team-7"})] * 100
        assert set(reviewer.asked.values()) == {1}
        assert reviewer.most_at_once <= MOST_AT_ONCE

    virtual_time.run(main())


def test_tenant_of_many_tokens_and_namespaces_keeps_nobody_waiting() -> None:
    async def main() -> None:
        reviews = AccessReviews(SlowReviewer(), asyncio.get_running_loop().time)
        many = asyncio.ensure_future(ask_many(reviews, 20, uid=str))
        await asyncio.sleep(5 * REVIEW_SECONDS)
        started_at = asyncio.get_running_loop().time()
        caller = await reviews.identify("other", "10.0.0.1")
        assert caller is not None
        assert await reviews.find_visible(caller, ("team-7",)) == frozenset({"team-7"})
        assert asyncio.get_running_loop().time() - started_at < 20 * REVIEW_SECONDS
        assert not many.done()
        assert await many == [frozenset({"team-7"})] * 20

    virtual_time.run(main())


def test_rights_in_many_namespaces_are_kept_for_several_callers() -> None:
    async def main() -> None:
        reviewer = SlowReviewer()
        reviews = AccessReviews(reviewer, lambda: 0.0)
        namespaces = frozenset(f"n{number}" for number in range(1000))
        callers = [Caller(f"user-{number}") for number in range(6)]
        for _ in range(2):
            for caller in callers:
                await reviews.find_visible(caller, namespaces)
        assert set(reviewer.asked.values()) == {len(callers)}

    virtual_time.run(main())


def test_review_that_fails_is_asked_again() -> None:
    async def main() -> None:
        reviewer = SlowReviewer()
        reviews = AccessReviews(reviewer, asyncio.get_running_loop().time)
        reviewer.fails = True
        answers = await ask_many(reviews, 3)
        assert [type(answer).__name__ for answer in answers] == ["ReviewFailedError"] * 3
        reviewer.fails = False
        assert await ask_many(reviews, 3) == [frozenset({"team-7"})] * 3

    virtual_time.run(main())


def test_caller_who_hangs_up_ends_no_review_of_another_request() -> None:
    async def main() -> None:
        reviews = AccessReviews(SlowReviewer(), asyncio.get_running_loop().time)
        first = asyncio.ensure_future(reviews.identify("tenant", "10.0.0.1"))
        second = asyncio.ensure_future(reviews.identify("tenant", "10.0.0.1"))
        await asyncio.sleep(REVIEW_SECONDS / 2)
        first.cancel()
        assert await second == TENANT

    virtual_time.run(main())


def test_flood_of_false_tokens_keeps_callers_from_elsewhere_waiting_no_longer_than_its_share() -> None:
    async def main() -> None:
        reviewer = SlowReviewer()
        reviews = AccessReviews(reviewer, asyncio.get_running_loop().time)
        flood = [asyncio.ensure_future(reviews.identify(f"x-{number}", "10.0.0.66")) for number in range(5000)]
        await asyncio.sleep(REVIEW_SECONDS / 2)
        started_at = asyncio.get_running_loop().time()
        callers = await asyncio.gather(*(reviews.identify(f"user-{n}", f"10.0.1.{n}") for n in range(6)))
        assert [caller and caller.username for caller in callers] == [f"user-{n}" for n in range(6)]
        assert asyncio.get_running_loop().time() - started_at < 3 * REVIEW_SECONDS
        for request in flood:
            request.cancel()
        await asyncio.sleep(3 * REVIEW_SECONDS)
        assert (len(reviews._running), len(reviewer.asked) < 40) == (0, True), "a token that nobody waits for"

    virtual_time.run(main())


def test_tokens_of_nobody_push_out_no_caller() -> None:
    class Strict(SlowReviewer):
        async def review(self, resource: Resource, spec: Mapping[str, Any]) -> Obj:
            answer = await super().review(resource, spec)
            return answer if spec["token"] == "tenant" else {"status": {"authenticated": False}}

    async def main() -> None:
        reviewer = Strict()
        reviews = AccessReviews(reviewer, lambda: 0.0)
        assert await reviews.identify("tenant", "10.0.0.1") == TENANT
        for number in range(MOST_KEPT + 1):
            assert await reviews.identify(f"x-{number}", "10.0.0.1") is None
        assert await reviews.identify("tenant", "10.0.0.1") == TENANT
        assert reviewer.asked["tenant"] == 1

    virtual_time.run(main())
