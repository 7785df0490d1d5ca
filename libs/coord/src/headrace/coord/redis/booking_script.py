"""The booking function, as Redis runs it; `headrace.coord.redis.booking_board` says what it does."""

from __future__ import annotations

LEDGER = "headrace:v1:ledger:"
ENTRY = "headrace:v1:booking:"

SLICE_US = 25_000
ARRIVAL_US = 100_000
"""From a placement until the engine counts the sequence: the gateway answers, submits, the engine queues. A heartbeat
stamped sooner than that after a booking may not show it."""

NEAR_TIE = 0.05
"""Costs closer than this are equal for all we know: measured rates wander by about as much."""

_CONSTANTS = f"""
local ledger_prefix, entry_prefix = '{LEDGER}', '{ENTRY}'
local slice_us, arrival_us, near_tie = {SLICE_US}, {ARRIVAL_US}, {NEAR_TIE}
"""

# KEYS: the replica board. ARGV: longest_us, how many wishes, releases and replicas; the replicas' ids, then their
# epochs; for each wish its entry's name and its numbers, packed; the names of the entries to release.
BOOK = (
    _CONSTANTS
    + """
local clock = redis.call('TIME')
local now = clock[1] * 1000000 + clock[2]
local this_slice = math.floor(now / slice_us)
local longest_us = tonumber(ARGV[1])
local longest_ms = math.ceil(longest_us / 1000)
local wishes, releases, replicas = tonumber(ARGV[2]), tonumber(ARGV[3]), tonumber(ARGV[4])
local ids, epochs = {}, {}
for i = 1, replicas do ids[i], epochs[i] = ARGV[4 + i], ARGV[4 + replicas + i] end

local ledgers, changed = {}, {}
local function opened(id, epoch, stamp, packed)
  local ledger = {epoch = epoch, n = 0, t = 0, at = {}, ns = {}, ts = {}}
  if packed then
    local old = cmsgpack.unpack(packed)
    if old[1] == epoch then
      for i = 2, #old, 3 do
        local ends = (old[i] + 1) * slice_us
        if ends + arrival_us > stamp and ends + longest_us > now then
          table.insert(ledger.at, old[i])
          table.insert(ledger.ns, old[i + 1])
          table.insert(ledger.ts, old[i + 2])
          ledger.n, ledger.t = ledger.n + old[i + 1], ledger.t + old[i + 2]
        end
      end
    end
  end
  ledgers[id] = ledger
  return ledger
end

local function moved(id, slice, n, t)
  local ledger = ledgers[id]
  changed[id] = true
  ledger.n, ledger.t = ledger.n + n, ledger.t + t
  for i = #ledger.at, 1, -1 do
    if ledger.at[i] == slice then
      ledger.ns[i], ledger.ts[i] = ledger.ns[i] + n, ledger.ts[i] + t
      return
    end
  end
  table.insert(ledger.at, slice)
  table.insert(ledger.ns, n)
  table.insert(ledger.ts, t)
end

local function unbook(packed)
  local id, epoch, slice, n, t = unpack(cmsgpack.unpack(packed))
  local ledger = ledgers[id]
  if not ledger then
    -- Not among the candidates: its heartbeats settle it when it is next looked at.
    ledger = opened(id, epoch, 0, redis.call('GET', ledger_prefix .. id) or nil)
  end
  if ledger.epoch ~= epoch then return end
  for i = 1, #ledger.at do
    if ledger.at[i] == slice then return moved(id, slice, -n, -t) end
  end
end

-- What stands in the way of each replica: 0 nothing, 1 gone, 2 another life, 3 stale.
local obstacle, age = {}, {}
if replicas > 0 then
  local records = redis.call('HMGET', KEYS[1], unpack(ids))
  local names = {}
  for i = 1, replicas do names[i] = ledger_prefix .. ids[i] end
  local packed = redis.call('MGET', unpack(names))
  for i = 1, replicas do
    local stamp = records[i] and tonumber(string.sub(records[i], 41, 60))
    if not stamp then
      obstacle[i], age[i] = 1, 0
    else
      obstacle[i], age[i] = 0, now - stamp
      if string.sub(records[i], 1, 20) ~= epochs[i] then obstacle[i] = 2
      elseif not ledgers[ids[i]] then opened(ids[i], epochs[i], stamp, packed[i]) end
    end
  end
end

local function rank(c, n, t)
  local joined = math.min(n, math.max(0, c.room))
  local itl = c.itl_s + c.growth_s * joined
  local slots = math.max(0, (n - c.room) / c.full)
  local blocks = math.max(0, (t / c.block_size - c.spare_blocks) / c.total_blocks)
  local queue = c.ready_s + t * c.token_s + c.neighbour_tokens * itl * math.max(slots, blocks)
  c.first = queue + c.prefill_s - math.min(c.credit_s, queue)
  c.total = c.first + c.later_tokens * itl
  c.crowding = (n - c.room) / c.full
end

local function least(from, field, tie)
  local low = math.huge
  for _, c in ipairs(from) do low = math.min(low, c[field]) end
  local near = {}
  for _, c in ipairs(from) do
    if c[field] <= low * (1 + tie) then table.insert(near, c) end
  end
  return near
end

local function chosen_of(free, preference, chance)
  if preference == 2 then return free[1] end
  local equal = free
  if preference == 0 then
    equal = least(least(free, 'total', near_tie), 'first', near_tie)
  end
  local low = math.huge
  for _, c in ipairs(equal) do low = math.min(low, c.crowding) end
  local best = {}
  for _, c in ipairs(equal) do
    if c.crowding == low then table.insert(best, c) end
  end
  return best[math.floor(chance * #best) + 1]
end

local entries = {}
for i = 1, wishes do entries[i] = entry_prefix .. ARGV[4 + 2 * replicas + 2 * i - 1] end
for i = 1, releases do entries[wishes + i] = entry_prefix .. ARGV[4 + 2 * replicas + 2 * wishes + i] end
-- By name, because a batch may name one twice: a wish repeated, or released and wished again.
local entry_of = {}
for i, packed in ipairs(#entries > 0 and redis.call('MGET', unpack(entries)) or {}) do entry_of[entries[i]] = packed end
local function take_back(entry)
  if entry_of[entry] then unbook(entry_of[entry]) end
  entry_of[entry] = nil
end
for i = 1, releases do take_back(entries[wishes + i]) end
if releases > 0 then redis.call('DEL', unpack(entries, wishes + 1)) end

local answers = {}
for w = 1, wishes do
  local packed = ARGV[4 + 2 * replicas + 2 * w]
  local had = entry_of[entries[w]]
  take_back(entries[w])
  local preference, freshness_us, chance, sequences, count, at = struct.unpack('<ddddd', packed)
  local free, answer, position = {}, {}, 0
  for i = 1, count do
    local c = {}
    c.replica, c.tokens, c.ready_s, c.token_s, c.prefill_s, c.itl_s, c.growth_s, c.room, c.full, c.later_tokens,
      c.neighbour_tokens, c.spare_blocks, c.block_size, c.total_blocks, c.credit_s, c.allowance, at =
      struct.unpack('<dddddddddddddddd', packed, at)
    local state, ledger = obstacle[c.replica], ledgers[ids[c.replica]]
    -- A stamp from the future means that the server's clock was set back; the board drops such records, too.
    if state == 0 and (age[c.replica] > freshness_us or age[c.replica] < -1000000) then state = 3 end
    if state == 0 and ledger.epoch ~= epochs[c.replica] then state = 2 end
    local n, t = 0, 0
    if state == 0 then
      n, t = ledger.n, ledger.t
      rank(c, n, t)
      c.position = i
      if n >= c.allowance then state = 4 else table.insert(free, c) end
    end
    table.insert(answer, state)
    table.insert(answer, age[c.replica])
    table.insert(answer, n)
    table.insert(answer, t)
  end
  if #free > 0 then
    local best = chosen_of(free, preference, chance)
    local id = ids[best.replica]
    position = best.position
    moved(id, this_slice, sequences, best.tokens)
    local entry = cmsgpack.pack({id, epochs[best.replica], this_slice, sequences, best.tokens})
    redis.call('SET', entries[w], entry, 'PX', longest_ms)
    entry_of[entries[w]] = entry
  elseif had then
    redis.call('DEL', entries[w])
  end
  -- One string: hundreds of numbers would take the client longer to read than the server to find.
  answers[w] = struct.pack('<' .. string.rep('d', 1 + 4 * count), position, unpack(answer))
end

for id in pairs(changed) do
  local ledger, flat = ledgers[id], {ledgers[id].epoch}
  for i = 1, #ledger.at do
    if ledger.ns[i] > 0 then
      table.insert(flat, ledger.at[i])
      table.insert(flat, ledger.ns[i])
      table.insert(flat, ledger.ts[i])
    end
  end
  redis.call('SET', ledger_prefix .. id, cmsgpack.pack(flat), 'PX', longest_ms)
end
return answers
"""
)
