//! A device that does nothing and counts what it is told: for measuring what the host does, and for asking how much memory
//! something would take. All that is read of it is 0.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

use super::driver::{Address, DeviceInfo, Driver, GraphId, HostId, Launch, taken_bytes};
use crate::Result;

/// How often each call was made.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Calls {
    /// Uploads.
    pub uploads: u64,
    /// Bytes of them.
    pub uploaded_bytes: u64,
    /// Downloads, at once or later.
    pub downloads: u64,
    /// Kernels that were launched or recorded.
    pub launches: u64,
    /// Graphs that were run.
    pub replays: u64,
    /// Memory that was taken, of the device or of the host.
    pub taken: u64,
}

/// The device.
#[derive(Debug)]
pub struct Null {
    info: DeviceInfo,
    uploads: AtomicU64,
    uploaded_bytes: AtomicU64,
    downloads: AtomicU64,
    launches: AtomicU64,
    replays: AtomicU64,
    taken: AtomicU64,
    held: Mutex<Held>,
}

/// Memory that has been taken and not given back: nobody looks what is there, so there is none.
#[derive(Debug, Default)]
struct Held {
    bytes: u64,
    /// Bytes by address, and where there has been nothing yet.
    of: BTreeMap<Address, u64>,
    next: Address,
}

const MEMORY_BYTES: u64 = 1 << 40;

impl Null {
    /// One that has been told nothing.
    pub fn new() -> Self {
        let [uploads, uploaded_bytes, downloads, launches, replays, taken] = Default::default();
        let info =
            DeviceInfo { name: "nothing".to_owned(), capability: (8, 0), processors: 1, memory_bytes: MEMORY_BYTES };
        Self { info, uploads, uploaded_bytes, downloads, launches, replays, taken, held: Mutex::default() }
    }

    /// Bytes that are held, as [`taken_bytes`] counts them.
    pub fn held_bytes(&self) -> u64 {
        self.held.lock().unwrap_or_else(PoisonError::into_inner).bytes
    }

    /// What it has been told so far.
    pub fn calls(&self) -> Calls {
        let of = |count: &AtomicU64| count.load(Ordering::Relaxed);
        Calls {
            uploads: of(&self.uploads),
            uploaded_bytes: of(&self.uploaded_bytes),
            downloads: of(&self.downloads),
            launches: of(&self.launches),
            replays: of(&self.replays),
            taken: of(&self.taken),
        }
    }
}

impl Default for Null {
    fn default() -> Self {
        Self::new()
    }
}

fn count(calls: &AtomicU64) -> Result<()> {
    calls.fetch_add(1, Ordering::Relaxed);
    Ok(())
}

impl Driver for Null {
    fn info(&self) -> &DeviceInfo {
        &self.info
    }
    fn free_bytes(&self) -> Result<u64> {
        Ok(MEMORY_BYTES)
    }
    fn take(&self, _what: &'static str, bytes: usize) -> Result<Address> {
        let mut held = self.held.lock().unwrap_or_else(PoisonError::into_inner);
        let bytes = taken_bytes(bytes as u64);
        let at = held.next.max(taken_bytes(1));
        held.next = at + bytes;
        held.bytes += bytes;
        held.of.insert(at, bytes);
        count(&self.taken).map(|()| at)
    }
    fn give_back(&self, at: Address) {
        let mut held = self.held.lock().unwrap_or_else(PoisonError::into_inner);
        held.bytes -= held.of.remove(&at).unwrap_or_default();
    }
    fn fill(&self, _at: Address, _byte: u8, _bytes: usize) -> Result<()> {
        Ok(())
    }
    fn upload(&self, _to: Address, from: &[u8]) -> Result<()> {
        self.uploaded_bytes.fetch_add(from.len() as u64, Ordering::Relaxed);
        count(&self.uploads)
    }
    fn download(&self, to: &mut [u8], _from: Address) -> Result<()> {
        to.fill(0);
        count(&self.downloads)
    }
    fn take_host(&self, _what: &'static str, _bytes: usize) -> Result<HostId> {
        count(&self.taken).map(|()| 0)
    }
    fn give_back_host(&self, _host: HostId) {}
    fn download_later(&self, _host: HostId, _first: usize, _from: Address, _bytes: usize) -> Result<()> {
        count(&self.downloads)
    }
    fn read_host(&self, to: &mut [u8], _host: HostId) -> Result<()> {
        to.fill(0);
        Ok(())
    }
    fn copy(&self, _to: Address, _from: Address, _bytes: usize) -> Result<()> {
        Ok(())
    }
    fn launch(&self, _launch: &Launch) -> Result<()> {
        count(&self.launches)
    }
    fn synchronize(&self) -> Result<()> {
        Ok(())
    }
    fn begin_recording(&self) -> Result<()> {
        Ok(())
    }
    fn end_recording(&self) -> Result<GraphId> {
        Ok(0)
    }
    fn replay(&self, _graph: GraphId) -> Result<()> {
        count(&self.replays)
    }
    fn drop_graph(&self, _graph: GraphId) {}
}
