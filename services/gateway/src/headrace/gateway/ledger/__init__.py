"""What each request used: noted while it runs, kept through any death of this process, delivered to telemetry once.

See docs/adr/0014-usage-spool.md.
"""

from headrace.gateway.ledger.account import Account
from headrace.gateway.ledger.ledger import Ledger, LedgerSettings
from headrace.gateway.ledger.sink import Sink, TelemetrySink

__all__ = ["Account", "Ledger", "LedgerSettings", "Sink", "TelemetrySink"]
