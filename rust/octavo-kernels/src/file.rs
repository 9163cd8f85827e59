//! A read-only mapped file.

use std::{
    fs::{self, File},
    io,
    ops::Range,
    path::Path,
};

use memmap2::{Advice, Mmap, UncheckedAdvice};

/// A file's bytes, read from disk as they are touched.
///
/// The file must stay as it is while it is mapped. One that another program shortens ends this process with `SIGBUS`
/// when a byte past its new end is read; one that is rewritten in place shows the new bytes. Neither can be prevented
/// from here (nor can any reader that maps files), so model files are to be replaced by renaming, never overwritten.
#[derive(Debug)]
pub struct MappedFile(Mmap);

impl MappedFile {
    /// Maps the whole of the file at `path`.
    pub fn open(path: impl AsRef<Path>) -> io::Result<Self> {
        // Asked before it is opened: opening a named pipe would wait for its writer.
        if !fs::metadata(&path)?.is_file() {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "not a regular file"));
        }
        let file = File::open(path)?;
        // SAFETY: the bytes are only ever given out as `&[u8]` of a private read-only mapping. That nobody changes the
        // file meanwhile is the promise asked of the user in the type's documentation.
        let map = unsafe { Mmap::map(&file)? };
        Ok(Self(map))
    }

    /// All of it.
    pub fn bytes(&self) -> &[u8] {
        &self.0
    }

    /// Says that `range` will soon be read from end to end, so that the disk can run ahead. Only advice: errors are
    /// ignored.
    pub fn will_need(&self, range: Range<usize>) {
        let range = self.clip(range);
        if !range.is_empty() {
            let _ = self.0.advise_range(Advice::WillNeed, range.start, range.len());
        }
    }

    /// Says that `range` has been copied elsewhere: its pages leave this process's resident memory (those that lie
    /// wholly inside), so that packing a model's weights does not hold them twice. Reading them again is allowed and
    /// brings them back from the file.
    pub fn forget(&self, range: Range<usize>) {
        let page = page_bytes();
        let range = self.clip(range);
        let (start, end) = (range.start.next_multiple_of(page), range.end / page * page);
        if start < end {
            // SAFETY: on a read-only mapping of a file, dropped pages come back from that file with the same bytes, so
            // no `&[u8]` into them changes.
            let _ = unsafe { self.0.unchecked_advise_range(UncheckedAdvice::DontNeed, start, end - start) };
        }
    }

    fn clip(&self, range: Range<usize>) -> Range<usize> {
        let end = range.end.min(self.0.len());
        range.start.min(end)..end
    }
}

fn page_bytes() -> usize {
    // SAFETY: sysconf only reads a constant of the system.
    let bytes = unsafe { libc::sysconf(libc::_SC_PAGESIZE) };
    usize::try_from(bytes).unwrap_or(4096).max(1)
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn forgotten_pages_leave_memory_and_come_back() {
        let path = std::env::temp_dir().join(format!("octavo-mapped-file-{}", std::process::id()));
        let page = page_bytes();
        let bytes: Vec<u8> = (0..5 * page + 7).map(|i| (i * 31 % 251) as u8).collect();
        fs::write(&path, &bytes).unwrap();
        let file = MappedFile::open(&path).unwrap();
        file.will_need(0..usize::MAX);
        assert_eq!(file.bytes(), bytes);

        assert_eq!(resident_bytes(&file), 6 * page);
        file.forget(1..4 * page + 1);
        assert_eq!(resident_bytes(&file), 3 * page, "the first page and the last two were not wholly inside");
        assert_eq!(file.bytes(), bytes, "forgotten pages read the same");

        // Ranges that hold no whole page, are empty or lie past the end are fine.
        file.forget(3..page - 1);
        file.forget(bytes.len()..usize::MAX);
        #[allow(clippy::reversed_empty_ranges)]
        file.forget(9..3);
        drop(file);
        fs::remove_file(&path).unwrap();
    }

    /// `Rss` of the mapping, as the kernel counts it.
    fn resident_bytes(file: &MappedFile) -> usize {
        let start = format!("{:x}-", file.bytes().as_ptr() as usize);
        let maps = fs::read_to_string("/proc/self/smaps").unwrap();
        let of_file = maps.lines().skip_while(|line| !line.starts_with(&start));
        let rss = of_file.map(str::split_whitespace).find_map(|mut words| {
            (words.next() == Some("Rss:")).then(|| words.next().unwrap().parse::<usize>().unwrap())
        });
        rss.expect("a mapping has an Rss line") * 1024
    }

    #[test]
    fn what_cannot_be_mapped_is_an_error() {
        assert!(MappedFile::open("/no/such/file").is_err());
        assert!(MappedFile::open(std::env::temp_dir()).is_err());
    }
}
