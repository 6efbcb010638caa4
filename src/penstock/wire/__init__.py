"""The data plane: frames without I/O, Arrow columns, blocking and asyncio transports."""
