"""The engine of row functions: elementwise along all dimensions but one, with reductions along that one."""
