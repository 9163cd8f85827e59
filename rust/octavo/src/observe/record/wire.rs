//! Numbers, texts and lists as bytes: whole numbers in groups of seven bits, the lowest first, so that small ones are short.

use std::fmt;
use std::io::Read;

/// Bytes to be written.
#[derive(Debug, Default)]
pub struct Out(pub Vec<u8>);

impl Out {
    /// One byte.
    pub fn byte(&mut self, value: u8) {
        self.0.push(value);
    }

    /// A whole number.
    pub fn u64(&mut self, mut value: u64) {
        while value >= 0x80 {
            self.0.push(value as u8 | 0x80);
            value >>= 7;
        }
        self.0.push(value as u8);
    }

    /// A count, or a size.
    pub fn usize(&mut self, value: usize) {
        self.u64(value as u64);
    }

    /// A number that may be negative: the sign comes last.
    pub fn i32(&mut self, value: i32) {
        let value = i64::from(value);
        self.u64(((value << 1) ^ (value >> 63)) as u64);
    }

    /// All bits of a float.
    pub fn f32(&mut self, value: f32) {
        self.0.extend(value.to_le_bytes());
    }

    /// `true` or `false`.
    pub fn bool(&mut self, value: bool) {
        self.byte(value.into());
    }

    /// A text.
    pub fn text(&mut self, text: &str) {
        self.usize(text.len());
        self.0.extend(text.as_bytes());
    }

    /// Token ids.
    pub fn ids(&mut self, ids: &[u32]) {
        self.list(ids, |out, &id| out.u64(id.into()));
    }

    /// A list.
    pub fn list<T>(&mut self, items: &[T], item: impl Fn(&mut Self, &T)) {
        self.usize(items.len());
        items.iter().for_each(|one| item(self, one));
    }

    /// A value, or none.
    pub fn option<T>(&mut self, value: Option<T>, some: impl FnOnce(&mut Self, T)) {
        self.bool(value.is_some());
        if let Some(value) = value {
            some(self, value);
        }
    }
}

/// Why bytes cannot be read.
#[derive(Debug)]
pub enum Fault {
    /// The bytes end before the value does.
    Truncated,
    /// The value makes no sense.
    Wrong(String),
    /// The system could not read it.
    Read(std::io::Error),
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Truncated => f.write_str("an entry is cut off in its middle"),
            Self::Wrong(what) => f.write_str(what),
            Self::Read(error) => error.fmt(f),
        }
    }
}

/// A value that was read, or why not.
pub type Found<T> = Result<T, Fault>;

/// Says what is wrong.
pub fn wrong<T>(what: impl Into<String>) -> Found<T> {
    Err(Fault::Wrong(what.into()))
}

/// Bytes being read. Nothing is taken in memory that the file does not have.
#[derive(Debug)]
pub struct In<R> {
    inner: R,
    at: u64,
    len: u64,
}

impl<R: Read> In<R> {
    /// From a file of `len` bytes.
    pub fn new(inner: R, len: u64) -> Self {
        Self { inner, at: 0, len }
    }

    /// Bytes read so far.
    pub fn at(&self) -> u64 {
        self.at
    }

    /// Bytes that follow.
    pub fn left(&self) -> u64 {
        self.len - self.at
    }

    /// So many bytes.
    pub fn bytes(&mut self, count: u64) -> Found<Vec<u8>> {
        let mut bytes = vec![0; self.backed(count)?];
        self.fill(&mut bytes)?;
        Ok(bytes)
    }

    fn fill(&mut self, bytes: &mut [u8]) -> Found<()> {
        self.backed(bytes.len() as u64)?;
        self.inner.read_exact(bytes).map_err(|error| match error.kind() {
            // It has become shorter since its length was asked for.
            std::io::ErrorKind::UnexpectedEof => Fault::Truncated,
            _ => Fault::Read(error),
        })?;
        self.at += bytes.len() as u64;
        Ok(())
    }

    /// A count of things of at least a byte each, all of which the file has.
    fn backed(&self, count: u64) -> Found<usize> {
        match usize::try_from(count) {
            Ok(size) if count <= self.left() => Ok(size),
            _ => Err(Fault::Truncated),
        }
    }

    /// One byte.
    pub fn byte(&mut self) -> Found<u8> {
        let mut byte = [0];
        self.fill(&mut byte)?;
        Ok(byte[0])
    }

    /// A whole number.
    pub fn u64(&mut self) -> Found<u64> {
        let mut value = 0;
        for shift in (0..64).step_by(7) {
            let byte = self.byte()?;
            let bits = u64::from(byte & 0x7f);
            if (bits << shift) >> shift != bits {
                break;
            }
            value |= bits << shift;
            if byte & 0x80 == 0 {
                return Ok(value);
            }
        }
        wrong("a whole number has more than 64 bits")
    }

    /// A whole number of at most 32 bits.
    pub fn u32(&mut self) -> Found<u32> {
        let value = self.u64()?;
        u32::try_from(value).or_else(|_| wrong(format!("{value} where a number of 32 bits should be")))
    }

    /// A count, or a size.
    pub fn usize(&mut self) -> Found<usize> {
        let value = self.u64()?;
        usize::try_from(value).or_else(|_| wrong(format!("{value} is no size on this machine")))
    }

    /// A number that may be negative.
    pub fn i32(&mut self) -> Found<i32> {
        let value = self.u64()?;
        let signed = (value >> 1) as i64 ^ -((value & 1) as i64);
        i32::try_from(signed).or_else(|_| wrong(format!("{signed} where a number of 32 bits should be")))
    }

    /// A float.
    pub fn f32(&mut self) -> Found<f32> {
        let mut bytes = [0; 4];
        self.fill(&mut bytes)?;
        Ok(f32::from_le_bytes(bytes))
    }

    /// `true` or `false`.
    pub fn bool(&mut self) -> Found<bool> {
        match self.byte()? {
            0 => Ok(false),
            1 => Ok(true),
            other => wrong(format!("{other} where 0 or 1 should be")),
        }
    }

    /// A text.
    pub fn text(&mut self) -> Found<String> {
        let len = self.u64()?;
        String::from_utf8(self.bytes(len)?).or_else(|_| wrong("a text is not UTF-8"))
    }

    /// Token ids.
    pub fn ids(&mut self) -> Found<Vec<u32>> {
        self.list(Self::u32)
    }

    /// A list.
    pub fn list<T>(&mut self, mut item: impl FnMut(&mut Self) -> Found<T>) -> Found<Vec<T>> {
        let count = self.u64()?;
        let count = self.backed(count)?;
        // Grows as items are found: they may be larger here than in the file.
        let mut items = Vec::new();
        for _ in 0..count {
            items.push(item(self)?);
        }
        Ok(items)
    }

    /// A value, or none.
    pub fn option<T>(&mut self, some: impl FnOnce(&mut Self) -> Found<T>) -> Found<Option<T>> {
        if self.bool()? { some(self).map(Some) } else { Ok(None) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_are_read_back() {
        let numbers = (0..64).flat_map(|bit| [(1u64 << bit) - 1, 1 << bit]).chain([u64::MAX]).collect::<Vec<_>>();
        let signed = [0, 1, -1, 63, -64, 64, i32::MAX, i32::MIN];
        let mut out = Out::default();
        numbers.iter().for_each(|&number| out.u64(number));
        signed.iter().for_each(|&number| out.i32(number));
        out.f32(-0.0);
        out.text("ünïcode");
        out.option(Some(7), Out::u64);
        out.option(None, Out::u64);
        out.ids(&[1, u32::MAX]);
        let mut found = In::new(&out.0[..], out.0.len() as u64);
        assert_eq!(numbers, numbers.iter().map(|_| found.u64().unwrap()).collect::<Vec<_>>());
        assert_eq!(signed, signed.map(|_| found.i32().unwrap()));
        assert_eq!(found.f32().unwrap().to_bits(), (-0.0f32).to_bits());
        assert_eq!(found.text().unwrap(), "ünïcode");
        assert_eq!([found.option(In::u64).unwrap(), found.option(In::u64).unwrap()], [Some(7), None]);
        assert_eq!(found.ids().unwrap(), [1, u32::MAX]);
        assert!(matches!(found.byte(), Err(Fault::Truncated)));
    }

    #[test]
    fn sizes_that_the_file_does_not_have_take_no_memory() {
        let mut out = Out::default();
        out.u64(u64::MAX);
        let found = || In::new(&out.0[..], out.0.len() as u64);
        assert!(matches!(found().text(), Err(Fault::Truncated)));
        assert!(matches!(found().ids(), Err(Fault::Truncated)));
        let too_long = [0xff; 11];
        assert!(matches!(In::new(&too_long[..], 11).u64(), Err(Fault::Wrong(_))));
    }
}
