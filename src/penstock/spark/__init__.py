"""The Spark source, sink and pipelines: the only package that imports pyspark."""
