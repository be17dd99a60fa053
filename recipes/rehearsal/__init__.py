"""The hostfile's machines as network namespaces of this one."""
