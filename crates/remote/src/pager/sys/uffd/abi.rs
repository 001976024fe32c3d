//! The kernel's ABI of userfaultfd: numbers and structures of `linux/userfaultfd.h`.

#[repr(C)]
#[derive(Clone, Copy, Default)]
pub struct UffdRange {
    pub start: u64,
    pub len: u64,
}

#[repr(C)]
#[derive(Default)]
pub struct UffdApi {
    pub api: u64,
    pub features: u64,
    pub ioctls: u64,
}

#[repr(C)]
pub struct UffdRegister {
    pub range: UffdRange,
    pub mode: u64,
    pub ioctls: u64,
}

/// `uffdio_copy` and `uffdio_move`.
#[repr(C)]
pub struct UffdTransfer {
    pub dst: u64,
    pub src: u64,
    pub len: u64,
    pub mode: u64,
    pub done: i64,
}

/// `uffdio_zeropage` and `uffdio_poison`.
#[repr(C)]
pub struct UffdFill {
    pub range: UffdRange,
    pub mode: u64,
    pub done: i64,
}

/// `uffdio_writeprotect`.
#[repr(C)]
pub struct UffdProtect {
    pub range: UffdRange,
    pub mode: u64,
}

/// `uffd_msg`, with the fields of a page fault.
#[repr(C)]
#[derive(Clone, Copy, Default)]
pub struct UffdMessage {
    pub event: u8,
    pub reserved: [u8; 7],
    pub flags: u64,
    pub address: u64,
    pub thread: u32,
    pub reserved_end: u32,
}
