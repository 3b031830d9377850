"""Writers of other formats: chat, ATIF, Inspect logs, Parquet."""
