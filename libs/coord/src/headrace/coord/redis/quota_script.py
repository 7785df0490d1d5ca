"""The Lua behind `quota_board`: what a tenant has used, in keys under `headrace:v1:quota:{tenant}`.

    :requests, :tokens   hash; an amount per bucket of 1/600 window, `first` and `last` bucket, `sum`
    :day                 hash; unix day -> tokens, and which days have begun here
    :records             hash; reservation -> "tokens request-bucket token-bucket day"
    :leases              sorted set; reservation -> when it lapses (µs). Its size is the requests under way
    :settled             sorted set; reservation -> when it ended (µs), kept for SETTLED_RETENTION_S

A window holds the buckets that overlap it, the oldest one as a whole: the sum is never less than what was taken in
the last 60 s, so a sum within the limit keeps *every* 60 s within it. It lets go up to one bucket (0.1 s) late.
"""

SPAN = 600
"""Buckets in a window."""

SETTLED_RETENTION_S = 120
"""How long an ended reservation is remembered, so that a command that comes late or twice changes nothing."""

PRELUDE = """
local LEASE, WIDTH = tonumber(ARGV[1]), tonumber(ARGV[2])
local SPAN, RETENTION, DAYS_MS = 600, 120000000, 172800000
local clock = redis.call('TIME')
local now = clock[1] * 1000000 + clock[2]
local current = math.floor(now / WIDTH)
local today = math.floor(clock[1] / 86400)

local function text(number) return string.format('%.0f', number) end

-- The window's sum, first and last bucket, without what has left it.
local function rolled(key)
  local state = redis.call('HMGET', key, 'first', 'last', 'sum')
  local first, last, sum = tonumber(state[1]), tonumber(state[2]), tonumber(state[3])
  if not first then return 0 end
  if last > current + 10 then
    -- The server's clock was set back by more than ten buckets. All of it counts as taken now: waiting for the clock
    -- to catch up could lock the tenant out for hours, and forgetting would let twice the limit through.
    redis.call('DEL', key)
    redis.call('HSET', key, 'first', text(current), 'last', text(current), 'sum', text(sum), text(current), text(sum))
    redis.call('PEXPIRE', key, math.ceil((SPAN + 10) * WIDTH / 1000))
    return sum, current, current
  end
  local oldest = current - SPAN
  if last < oldest then
    redis.call('DEL', key)
    return 0
  end
  if first < oldest then
    for bucket = first, oldest - 1 do
      local amount = redis.call('HGET', key, text(bucket))
      if amount then
        sum = sum - amount
        redis.call('HDEL', key, text(bucket))
      end
    end
    first = oldest
    redis.call('HSET', key, 'first', text(first), 'sum', text(sum))
  end
  return sum, first, last
end

local function add(key, amount)
  local _, first, last = rolled(key)
  local bucket = math.max(current, last or 0)
  if not first then redis.call('HSET', key, 'first', text(bucket)) end
  redis.call('HSET', key, 'last', text(bucket))
  redis.call('HINCRBY', key, text(bucket), text(amount))
  redis.call('HINCRBY', key, 'sum', text(amount))
  redis.call('PEXPIRE', key, math.ceil((SPAN + 10) * WIDTH / 1000))
  return bucket
end

-- Take an amount out of the bucket it was added to; nothing when that has left the window.
local function give_back(key, bucket, amount)
  local there = tonumber(redis.call('HGET', key, text(bucket)) or 0)
  amount = math.min(amount, there)
  if amount <= 0 then return end
  redis.call('HINCRBY', key, text(bucket), text(-amount))
  redis.call('HINCRBY', key, 'sum', text(-amount))
end

local function add_to_day(base, day, amount)
  if day < today - 1 then return end
  redis.call('HINCRBY', base .. ':day', text(day), text(amount))
  redis.call('HDEL', base .. ':day', text(today - 2))
  redis.call('PEXPIRE', base .. ':day', DAYS_MS)
end

local function keep(base, id)
  redis.call('ZADD', base .. ':leases', text(now + LEASE), id)
  redis.call('PEXPIRE', base .. ':leases', DAYS_MS)
  redis.call('PEXPIRE', base .. ':records', DAYS_MS)
end

local function take(base, id, tokens, is_new)
  local asked = is_new and add(base .. ':requests', 1) or 0
  local bucket = add(base .. ':tokens', tokens)
  add_to_day(base, today, tokens)
  local record = table.concat({text(tokens), text(asked), text(bucket), text(today)}, ' ')
  redis.call('HSET', base .. ':records', id, record)
  keep(base, id)
end

-- End a reservation at its actual cost. Less than reserved goes back to where it was taken; more is debt of now.
local function drop(base, id, actual, is_void)
  local record = redis.call('HGET', base .. ':records', id)
  if not record then return false end
  local tokens, asked, bucket, day = string.match(record, '(%d+) (%d+) (%d+) (%d+)')
  local over = actual - tokens
  if over > 0 then add(base .. ':tokens', over) end
  if over < 0 then give_back(base .. ':tokens', bucket, -over) end
  if over ~= 0 then add_to_day(base, tonumber(day), over) end
  if is_void then give_back(base .. ':requests', asked, 1) end
  redis.call('HDEL', base .. ':records', id)
  redis.call('ZREM', base .. ':leases', id)
  return true
end

local function is_settled(base, id) return redis.call('ZSCORE', base .. ':settled', id) end

local function settle(base, id, actual, is_void, is_new)
  if is_settled(base, id) then return end
  if not drop(base, id, actual, is_void) and not is_void then
    -- Unknown here: taken while Redis was away, lapsed since, or lost with Redis' memory. It was used all the same.
    if is_new then add(base .. ':requests', 1) end
    if actual > 0 then
      add(base .. ':tokens', actual)
      add_to_day(base, today, actual)
    end
  end
  redis.call('ZADD', base .. ':settled', text(now), id)
  redis.call('PEXPIRE', base .. ':settled', RETENTION / 1000)
end

-- Reservations that nobody renews belong to a gateway that died: their tokens go back, a journal may settle them yet.
local function sweep(base)
  local lapsed = redis.call('ZRANGEBYSCORE', base .. ':leases', '-inf', text(now), 'LIMIT', 0, 100)
  for _, id in ipairs(lapsed) do
    if not drop(base, id, 0, false) then redis.call('ZREM', base .. ':leases', id) end
  end
  redis.call('ZREMRANGEBYSCORE', base .. ':settled', '-inf', text(now - RETENTION))
end
"""

RESERVE = (
    PRELUDE
    + """
local base, id, tokens = KEYS[1], ARGV[3], tonumber(ARGV[4])
local per_minute, tokens_per_minute, per_day, at_once = unpack(ARGV, 5, 8)

-- µs until `needed` will have left the window; -1 for never.
local function wait_for(key, first, last, needed, sum)
  if needed > sum then return -1 end
  local buckets = {}
  for bucket = first, last do table.insert(buckets, text(bucket)) end
  for index, amount in ipairs(redis.call('HMGET', key, unpack(buckets))) do
    needed = needed - (tonumber(amount or 0) or 0)
    if needed <= 0 then return (first + index + SPAN) * WIDTH - now end
  end
  return -1
end

local function window(name, quota, limit, amount)
  local key = base .. name
  local sum, first, last = rolled(key)
  if limit == '' or sum + amount <= tonumber(limit) then return nil end
  return {quota, limit, text(sum), wait_for(key, first, last, sum + amount - limit, sum)}
end

local function day(limit, used)
  if limit == '' or used + tokens <= tonumber(limit) then return nil end
  local wait = tokens > tonumber(limit) and -1 or (today + 1) * 86400000000 - now
  return {'tokens_per_day', limit, text(used), wait}
end

local function concurrency(limit)
  local running = redis.call('ZCARD', base .. ':leases')
  if limit == '' or running < tonumber(limit) then return nil end
  -- When an answer will end nobody knows; come back in a second.
  return {'max_concurrent_requests', limit, text(running), limit == '0' and -1 or 1000000}
end

sweep(base)
local key = base .. ':day'
if redis.call('HSETNX', key, 'begun' .. text(today), 1) == 1 then
  -- Either the day is new or this server is: then what a gateway saw of the day is what it has forgotten. Renewals may
  -- have brought back a part of that already.
  if ARGV[9] == text(today) and tonumber(ARGV[10]) > tonumber(redis.call('HGET', key, text(today)) or 0) then
    redis.call('HSET', key, text(today), ARGV[10])
  end
  redis.call('HDEL', key, 'begun' .. text(today - 2))
  redis.call('PEXPIRE', key, DAYS_MS)
end
local function used_today() return tonumber(redis.call('HGET', key, text(today)) or 0) end

if is_settled(base, id) then return {'settled', text(today), text(used_today())} end
if redis.call('HEXISTS', base .. ':records', id) == 1 then return {'repeated', text(today), text(used_today())} end

local refusals = {
  concurrency(at_once),
  window(':requests', 'requests_per_minute', per_minute, 1),
  window(':tokens', 'tokens_per_minute', tokens_per_minute, tokens),
  day(per_day, used_today()),
}
local worst
for index = 1, 4 do
  local found = refusals[index]
  if found and (not worst or found[4] == -1 or (worst[4] ~= -1 and found[4] > worst[4])) then worst = found end
end
if worst then
  return {'refused', text(today), text(used_today()), worst[1], worst[2], worst[3], text(worst[4])}
end
take(base, id, tokens, true)
return {'taken', text(today), text(used_today())}
"""
)

UPDATE = (
    PRELUDE
    + """
for index = 3, #ARGV, 5 do
  local base, verb, id = KEYS[tonumber(ARGV[index])], ARGV[index + 1], ARGV[index + 2]
  local tokens, is_new = tonumber(ARGV[index + 3]), ARGV[index + 4] == '1'
  if verb == 'settle' then settle(base, id, tokens, false, is_new) end
  if verb == 'void' then settle(base, id, 0, true, is_new) end
  if verb == 'renew' and not is_settled(base, id) then
    if redis.call('HEXISTS', base .. ':records', id) == 1 then
      keep(base, id)
    else
      take(base, id, tokens, is_new)
    end
  end
end
return #ARGV
"""
)

HELLO = """
local clock = redis.call('TIME')
local now = clock[1] * 1000000 + clock[2]
redis.call('ZADD', KEYS[1], string.format('%.0f', now + ARGV[2]), ARGV[1])
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', string.format('%.0f', now))
redis.call('PEXPIRE', KEYS[1], 86400000)
return redis.call('ZCARD', KEYS[1])
"""
