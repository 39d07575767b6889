-- Counts limits for all replicas of the gateway: settles ended requests, and admits new ones, in one step.
--
-- It does to the numbers what rate_limits.py does to a `Meter`, by the clock of this server, in microseconds.
-- KEYS: the hash of replicas, with the time until which each one lives; the session of this replica; its scopes.
-- ARGV: the name of this replica, and the batch. The reply is empty if this server has lost batches before it.
local replica, batch = ARGV[1], cmsgpack.unpack(ARGV[2])
local clock = redis.call('TIME')
local now = clock[1] * 1000000 + clock[2]
local minute, day_ms = 60000000, 86400000

-- A batch that comes again, because its reply was lost, is counted once.
local session = redis.call('HMGET', KEYS[2], 'number', 'reply')
local last = tonumber(session[1] or 0)
if batch.number <= last then return session[2] end
if batch.number > last + 1 and not batch.is_first then return '' end

redis.call('HSET', KEYS[1], replica, string.format('%.0f', now + batch.lease_us))
local lives = {}
local known = redis.call('HGETALL', KEYS[1])
for n = 1, #known, 2 do
  if tonumber(known[n + 1]) >= now then lives[known[n]] = true else redis.call('HDEL', KEYS[1], known[n]) end
end

-- A scope: when its work ends and what was given back, of requests (r) and tokens (t), and running requests by replica.
local scopes = {}
for i, told in ipairs(batch.scopes) do
  local scope = {r = 0, t = 0, R = 0, T = 0, others = 0, running = told[1]}
  local fields = redis.call('HGETALL', KEYS[i + 2])
  for n = 1, #fields, 2 do
    local name, value = fields[n], tonumber(fields[n + 1])
    if scope[name] then
      scope[name] = value
    elseif not lives[name] then
      redis.call('HDEL', KEYS[i + 2], name)
    elseif name ~= replica then
      scope.others = scope.others + value
    end
  end
  scopes[i] = scope
end

for _, settlement in ipairs(batch.settlements) do
  local number, kind, mark, earliest, unused = unpack(settlement)
  local scope, ends, given = scopes[number], kind == 0 and 'r' or 't', kind == 0 and 'R' or 'T'
  if unused < 0 then
    scope[ends] = math.max(scope[ends], now) - unused
  else
    local ahead = math.min(math.max(mark - scope[given] - now, earliest - now, 0), unused)
    scope[ends], scope[given] = scope[ends] - ahead, scope[given] + ahead
  end
end

-- The replica may know of more; what was taken back above is not in it.
for i, told in ipairs(batch.scopes) do
  if told[2] > 0 then scopes[i].r = math.max(scopes[i].r, now + told[2]) end
  if told[3] > 0 then scopes[i].t = math.max(scopes[i].t, now + told[3]) end
end

-- A request has, for each of its scopes, the scope, the costs of the request and of its tokens, and the most running
-- ones; 0: no limit. It is answered with 0 and two marks for each scope, or with the longest wait, its scope and limit.
local function wait(scope, ends, cost)
  if cost == 0 then return 0 end
  return math.max(scope[ends] - now, 0) + cost - minute
end
local function charge(scope, ends, given, cost)
  if cost > 0 then scope[ends] = math.max(scope[ends], now) + cost end
  return scope[ends] + scope[given]
end
local answers = {}
for n, request in ipairs(batch.requests) do
  local answer = {0}
  for place, part in ipairs(request) do
    local scope = scopes[part[1]]
    local full = part[4] > 0 and scope.others + scope.running >= part[4]
    for kind, wait_us in ipairs({wait(scope, 'r', part[2]), wait(scope, 't', part[3]), full and 1 or 0}) do
      if wait_us > answer[1] then answer = {wait_us, place, kind} end
    end
  end
  if answer[1] == 0 then
    for _, part in ipairs(request) do
      local scope = scopes[part[1]]
      if part[4] > 0 then scope.running = scope.running + 1 end
      answer[#answer + 1] = charge(scope, 'r', 'R', part[2])
      answer[#answer + 1] = charge(scope, 't', 'T', part[3])
    end
  end
  answers[n] = answer
end

local backlogs = {}
for i, scope in ipairs(scopes) do
  local key, values = KEYS[i + 2], {}
  for _, name in ipairs({'r', 't', 'R', 'T'}) do
    values[#values + 1] = name
    values[#values + 1] = string.format('%.0f', scope[name])
  end
  redis.call('HSET', key, unpack(values))
  if scope.running > 0 then redis.call('HSET', key, replica, scope.running) else redis.call('HDEL', key, replica) end
  redis.call('PEXPIRE', key, day_ms)
  backlogs[i] = {math.max(scope.r - now, 0), math.max(scope.t - now, 0)}
end
local reply = cmsgpack.pack({now, backlogs, answers})
redis.call('HSET', KEYS[2], 'number', batch.number, 'reply', reply)
redis.call('PEXPIRE', KEYS[2], day_ms)
return reply
