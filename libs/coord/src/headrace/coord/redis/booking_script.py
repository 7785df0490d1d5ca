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

local unpacked, unpack_numbers, min, max = cmsgpack.unpack, struct.unpack, math.min, math.max
local ledgers, changed = {}, {}
-- Slices up to `first` have ended. Most ledgers are only added up, and taken apart when something is booked there.
local function opened(id, epoch, stamp, packed)
  local n, t, first, old = 0, 0, max(stamp - arrival_us, now - longest_us) / slice_us - 1, nil
  if packed then
    old = unpacked(packed)
    if old[1] == epoch then
      for i = 2, #old, 3 do
        if old[i] > first then n, t = n + old[i + 1], t + old[i + 2] end
      end
    else
      old = nil
    end
  end
  local ledger = {epoch = epoch, n = n, t = t, old = old, first = first}
  ledgers[id] = ledger
  return ledger
end

local function slices_of(ledger)
  if not ledger.at then
    local at, ns, ts, old, first = {}, {}, {}, ledger.old, ledger.first
    for i = 2, old and #old or 0, 3 do
      if old[i] > first then
        local k = #at + 1
        at[k], ns[k], ts[k] = old[i], old[i + 1], old[i + 2]
      end
    end
    ledger.at, ledger.ns, ledger.ts = at, ns, ts
  end
  return ledger.at
end

local function moved(id, slice, n, t)
  local ledger = ledgers[id]
  slices_of(ledger)
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

local function unbook(packed, ended)
  local id, epoch, slice, n, t = unpack(cmsgpack.unpack(packed))
  local ledger = ledgers[id]
  if not ledger then
    local record = redis.call('HGET', KEYS[1], id)
    -- Of another life, or gone: nothing is owed, and nothing of the new life's may be touched.
    if not record or string.sub(record, 1, 20) ~= epoch then return end
    local stamp = tonumber(string.sub(record, 41, 60)) or 0
    ledger = opened(id, epoch, stamp, redis.call('GET', ledger_prefix .. id) or nil)
  end
  if ledger.epoch ~= epoch then return end
  for _, at in ipairs(slices_of(ledger)) do
    if at == slice then return moved(id, slice, -n, -t) end
  end
  -- A heartbeat shows it already, and will until the next one: its places are free now. In the slice that ends with the
  -- first heartbeat stamped from now on.
  if ended then moved(id, math.floor((now - arrival_us) / slice_us), -n, 0) end
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

local function least(from, field, tie)
  local low, near = math.huge, {}
  for _, c in ipairs(from) do
    if c[field] < low then low = c[field] end
  end
  low = low * (1 + tie)
  for _, c in ipairs(from) do
    if c[field] <= low then near[#near + 1] = c end
  end
  return near
end

local function chosen_of(free, preference, chance)
  if preference == 2 then return free[1] end
  local equal = free
  if preference == 0 then
    equal = least(least(free, 'total', near_tie), 'first', near_tie)
  end
  local low, best = math.huge, {}
  for _, c in ipairs(equal) do
    if c.crowding < low then low = c.crowding end
  end
  for _, c in ipairs(equal) do
    if c.crowding == low then best[#best + 1] = c end
  end
  return best[math.floor(chance * #best) + 1]
end

local entries = {}
for i = 1, wishes do entries[i] = entry_prefix .. ARGV[4 + 2 * replicas + 2 * i - 1] end
for i = 1, releases do entries[wishes + i] = entry_prefix .. ARGV[4 + 2 * replicas + 2 * wishes + i] end
-- By name, because a batch may name one twice: a wish repeated, or released and wished again.
local entry_of = {}
for i, packed in ipairs(#entries > 0 and redis.call('MGET', unpack(entries)) or {}) do entry_of[entries[i]] = packed end
local function take_back(entry, ended)
  if entry_of[entry] then unbook(entry_of[entry], ended) end
  entry_of[entry] = nil
end
for i = 1, releases do take_back(entries[wishes + i], true) end
if releases > 0 then redis.call('DEL', unpack(entries, wishes + 1)) end

local answers = {}
for w = 1, wishes do
  local packed = ARGV[4 + 2 * replicas + 2 * w]
  local had = entry_of[entries[w]]
  take_back(entries[w])
  local preference, freshness_us, chance, sequences, count, at = unpack_numbers('<ddddd', packed)
  local free, answer, position = {}, {}, 0
  for i = 1, count do
    local replica, tokens, ready_s, token_s, prefill_s, itl_s, growth_s, room, full, later_tokens, neighbour_tokens,
      spare_blocks, block_size, total_blocks, credit_s, allowance, next_at =
      unpack_numbers('<dddddddddddddddd', packed, at)
    at = next_at
    local state, ledger = obstacle[replica], ledgers[ids[replica]]
    -- A stamp from the future means that the server's clock was set back; the board drops such records, too.
    if state == 0 and (age[replica] > freshness_us or age[replica] < -1000000) then state = 3 end
    if state == 0 and ledger.epoch ~= epochs[replica] then state = 2 end
    local n, t = 0, 0
    if state == 0 then
      n, t = ledger.n, ledger.t
      if n >= allowance then
        state = 4
      else
        local itl = itl_s + growth_s * min(n, max(0, room))
        local crowding = (n - room) / full
        local wait = max(0, crowding, (t / block_size - spare_blocks) / total_blocks)
        local queue = ready_s + t * token_s + neighbour_tokens * itl * wait
        local first = queue + prefill_s - min(credit_s, queue)
        free[#free + 1] = {
          position = i, replica = replica, tokens = tokens, first = first, total = first + later_tokens * itl,
          crowding = crowding
        }
      end
    end
    local k = 4 * i - 3
    answer[k], answer[k + 1], answer[k + 2], answer[k + 3] = state, age[replica], n, t
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
    if ledger.ns[i] ~= 0 then
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
