//! The few calls of a GPU's driver that the backend makes, as a trait with several homes: [`super::nvidia`] makes them,
//! [`super::shim`] does what they would have done, on the CPU and with every access checked, and [`super::null`] counts them.
//!
//! Everything runs in the order of the calls (one stream); nothing but `download`, `read_host` and `synchronize` waits.

use crate::Result;

/// A place in the device's memory; 0 is nowhere.
pub type Address = u64;

/// A page of a GPU's memory.
pub const PAGE_BYTES: u64 = 2 << 20;

/// What a GPU has less when `bytes` are taken: it gives whole pages, and small pieces of common ones.
pub fn taken_bytes(bytes: u64) -> u64 {
    const PIECE: u64 = 512;
    bytes.next_multiple_of(if bytes > PAGE_BYTES / 2 { PAGE_BYTES } else { PIECE })
}

/// What a device is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceInfo {
    /// As its maker calls it.
    pub name: String,
    /// Its compute capability, `(9, 0)` for an H200.
    pub capability: (u32, u32),
    /// Multiprocessors.
    pub processors: u32,
    /// Bytes of its memory.
    pub memory_bytes: u64,
}

/// An argument of a kernel.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Argument {
    /// The value, in the lowest bytes.
    pub bits: u64,
    /// How it is to be read.
    pub kind: ArgumentKind,
}

/// What kernels can be given.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum ArgumentKind {
    /// An address, or null.
    Pointer = 0,
    /// 32 bits, signed or not.
    Integer = 1,
    /// An f32.
    Float = 2,
}

/// A kernel, how many blocks of how many threads, and its arguments.
#[derive(Clone, Debug)]
pub struct Launch {
    /// Its name in `cu/`.
    pub kernel: String,
    /// Blocks.
    pub grid: [u32; 3],
    /// Threads of a block; whole warps.
    pub threads: u32,
    /// Dynamic shared memory of a block.
    pub shared_bytes: u32,
    /// In order.
    pub arguments: Vec<Argument>,
}

/// A recorded graph of launches; belongs to the driver that recorded it.
pub type GraphId = u64;

/// Memory of the host that a device copies to in the background; belongs to the driver that gave it.
pub type HostId = u64;

/// One device.
pub trait Driver: Send + Sync {
    /// What it is.
    fn info(&self) -> &DeviceInfo;
    /// Bytes that can still be taken.
    fn free_bytes(&self) -> Result<u64>;

    /// Takes memory, aligned to 256 bytes; what is in it is undefined.
    fn take(&self, what: &'static str, bytes: usize) -> Result<Address>;
    /// Gives it back.
    fn give_back(&self, at: Address);
    /// Sets bytes.
    fn fill(&self, at: Address, byte: u8, bytes: usize) -> Result<()>;
    /// From the host; `from` may be used again at once.
    fn upload(&self, to: Address, from: &[u8]) -> Result<()>;
    /// To the host, once everything before has run.
    fn download(&self, to: &mut [u8], from: Address) -> Result<()>;
    /// Takes memory of the host.
    fn take_host(&self, what: &'static str, bytes: usize) -> Result<HostId>;
    /// Gives it back.
    fn give_back_host(&self, host: HostId);
    /// To memory of the host, from its byte `first` on, once everything before has run.
    fn download_later(&self, host: HostId, first: usize, from: Address, bytes: usize) -> Result<()>;
    /// What memory of the host holds, once everything that was to be copied there has been.
    fn read_host(&self, to: &mut [u8], host: HostId) -> Result<()>;
    /// Within the device; the two do not overlap.
    fn copy(&self, to: Address, from: Address, bytes: usize) -> Result<()>;

    /// Runs a kernel.
    fn launch(&self, launch: &Launch) -> Result<()>;
    /// Waits for everything before.
    fn synchronize(&self) -> Result<()>;

    /// From here on launches, fills and copies are recorded, not run; uploads, downloads and taking memory are errors.
    fn begin_recording(&self) -> Result<()>;
    /// The graph of what was recorded.
    fn end_recording(&self) -> Result<GraphId>;
    /// Runs a graph.
    fn replay(&self, graph: GraphId) -> Result<()>;
    /// Gives a graph back.
    fn drop_graph(&self, graph: GraphId);
}
