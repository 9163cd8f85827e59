//! A log's file as chunks. Each is its length (32 bits), a sum, its bytes, and a sum again. A sum is the CRC-32 of all that
//! stands before it, other sums excepted: so a chunk that was changed, or taken out, or put in, is found where it is. The
//! length has a sum of its own, so that one that was changed is not taken for a file that was cut.

use std::io::{self, Read, Write};

use super::log::LogError;

const MAGIC: &[u8] = b"octavo log\n";
/// Another number, another format: there are no old logs to be read.
const VERSION: u32 = 3;

/// Whether a file that begins like this is a log, of any version.
pub fn is_log(begin: &[u8]) -> bool {
    begin.starts_with(MAGIC)
}

/// How many bytes say that.
pub const MAGIC_BYTES: u64 = MAGIC.len() as u64;

/// Writes chunks.
#[derive(Debug, Default)]
pub struct Sealer {
    sum: crc32fast::Hasher,
    begun: bool,
}

impl Sealer {
    /// Writes the next chunk, and before the first one what every log begins with. Says how many bytes that were.
    pub fn write(&mut self, out: &mut impl Write, chunk: &[u8]) -> io::Result<u64> {
        let mut written = 0;
        if !self.begun {
            self.begun = true;
            written += self.put(out, MAGIC)? + self.put(out, &VERSION.to_le_bytes())?;
        }
        let len = u32::try_from(chunk.len()).map_err(|_| io::ErrorKind::FileTooLarge)?;
        for part in [&len.to_le_bytes(), chunk] {
            written += self.put(out, part)?;
            let sum = self.sum.clone().finalize().to_le_bytes();
            out.write_all(&sum)?;
            written += sum.len() as u64;
        }
        Ok(written)
    }

    fn put(&mut self, out: &mut impl Write, bytes: &[u8]) -> io::Result<u64> {
        self.sum.update(bytes);
        out.write_all(bytes)?;
        Ok(bytes.len() as u64)
    }
}

/// A chunk that is as it was written.
#[derive(Debug)]
pub struct Chunk {
    /// Where in the file its bytes begin.
    pub begin: u64,
    /// What it says.
    pub bytes: Vec<u8>,
}

/// Reads chunks. Nothing is taken in memory that the file does not have.
#[derive(Debug)]
pub struct Chunks<R> {
    inner: R,
    at: u64,
    len: u64,
    sum: crc32fast::Hasher,
}

impl<R: Read> Chunks<R> {
    /// Of a file of `len` bytes, if it is a log.
    pub fn begin(inner: R, len: u64) -> Result<Self, LogError> {
        let mut chunks = Self { inner, at: 0, len, sum: crc32fast::Hasher::new() };
        let malformed = |at, what: String| LogError::Malformed { at, what };
        match chunks.take(MAGIC_BYTES)? {
            Some(magic) if is_log(&magic) => {}
            _ => return Err(malformed(0, "this is no octavo log".into())),
        }
        match chunks.number()? {
            Some(VERSION) => Ok(chunks),
            Some(version) => {
                Err(malformed(MAGIC_BYTES, format!("a log of version {version}; version {VERSION} is read")))
            }
            None => Err(malformed(MAGIC_BYTES, "the file ends in the middle of its header".into())),
        }
    }

    /// Bytes read so far.
    pub fn at(&self) -> u64 {
        self.at
    }

    /// Bytes that follow.
    pub fn left(&self) -> u64 {
        self.len - self.at
    }

    /// The next chunk. `None`: the file ends here, be it in the middle of one.
    pub fn next(&mut self) -> Result<Option<Chunk>, LogError> {
        let at = self.at;
        let Some(len) = self.number()? else { return Ok(None) };
        if !self.sound(at, "a chunk's length")? {
            return Ok(None);
        }
        let begin = self.at;
        let Some(bytes) = self.take(len.into())? else { return Ok(None) };
        Ok(self.sound(begin, "a chunk")?.then_some(Chunk { begin, bytes }))
    }

    /// Whether a sum is there, and that of all before it.
    fn sound(&mut self, at: u64, what: &str) -> Result<bool, LogError> {
        let wanted = self.sum.clone().finalize();
        let Some(found) = self.bytes(4)? else { return Ok(false) };
        if found == wanted.to_le_bytes() {
            return Ok(true);
        }
        Err(LogError::Damaged {
            at,
            what: format!("{what} is not what was written there: its checksum is another one"),
        })
    }

    fn number(&mut self) -> Result<Option<u32>, LogError> {
        let bytes = self.take(4)?;
        Ok(bytes.and_then(|bytes| bytes.try_into().ok()).map(u32::from_le_bytes))
    }

    /// So many bytes, which count for the sums.
    fn take(&mut self, count: u64) -> Result<Option<Vec<u8>>, LogError> {
        let bytes = self.bytes(count)?;
        if let Some(bytes) = &bytes {
            self.sum.update(bytes);
        }
        Ok(bytes)
    }

    fn bytes(&mut self, count: u64) -> Result<Option<Vec<u8>>, LogError> {
        let size = usize::try_from(count).ok().filter(|_| count <= self.left());
        let Some(size) = size else { return Ok(None) };
        let mut bytes = vec![0; size];
        match self.inner.read_exact(&mut bytes) {
            Ok(()) => {
                self.at += count;
                Ok(Some(bytes))
            }
            // It has become shorter since its length was asked for.
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => Ok(None),
            Err(error) => Err(LogError::Read(error)),
        }
    }
}
