"""Programs that read a ledger's file without a server: replay and export."""
