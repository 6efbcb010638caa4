"""Order within a partition, partitions side by side: lanes, and the tasks that call handlers."""
