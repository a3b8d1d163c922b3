//! Global memory: buffers at addresses that are far apart.

use super::Result;

/// The byte was written at some time.
const WRITTEN: u8 = 1;
/// This launch wrote the byte.
const WRITTEN_NOW: u8 = 2;
/// This launch read the byte by `ld.global.nc`, so it must not be written.
const READ_AS_CONSTANT: u8 = 4;

/// The memory that all kernels of a GPU share.
#[derive(Debug, Default)]
pub struct Global {
    /// `None` where a buffer was freed.
    buffers: Vec<Option<Buffer>>,
    /// What this launch marked: the numbers of buffers, and bytes in them.
    marked: Vec<(usize, usize, usize)>,
    /// Whether kernels may read what nobody wrote.
    poisoned: bool,
}

/// What a byte is that nobody wrote, where kernels may read it: a NaN in all formats.
const POISON: u8 = 0xFF;

#[derive(Debug)]
struct Buffer {
    bytes: Vec<u8>,
    marks: Vec<u8>,
}

/// Some bytes of a buffer.
struct Found<'a> {
    bytes: &'a mut [u8],
    marks: &'a mut [u8],
    marked: &'a mut Vec<(usize, usize, usize)>,
    /// The number of the buffer, and where the bytes start in it.
    place: (usize, usize),
}

impl Found<'_> {
    /// Sets a mark of the running launch.
    fn mark(&mut self, mark: u8) {
        let mut new = false;
        for known in self.marks.iter_mut() {
            new |= *known & mark != mark;
            *known |= mark;
        }
        if new {
            let (number, start) = self.place;
            self.marked.push((number, start, start + self.marks.len()));
        }
    }
}

impl Global {
    /// Memory in which kernels may read what nobody wrote, as they do of the gaps between rows: it is NaN, in all formats. So are
    /// registers that are moved and that nothing wrote, of which compilers leave some.
    pub fn poisoned() -> Self {
        Self {
            poisoned: true,
            ..Self::default()
        }
    }

    pub(super) fn is_poisoned(&self) -> bool {
        self.poisoned
    }

    /// The address of a new buffer of less than 4 GiB. Its bytes count as unwritten.
    pub fn allocate(&mut self, size: usize) -> u64 {
        self.buffers.push(Some(Buffer {
            bytes: vec![if self.poisoned { POISON } else { 0 }; size],
            marks: vec![0; size],
        }));
        (self.buffers.len() as u64) << 32
    }

    /// Ends the buffer at an address. Errors if none begins there.
    pub fn free(&mut self, address: u64) -> Result<()> {
        let number = (address >> 32) as usize;
        let buffer = number.checked_sub(1).filter(|_| address as u32 == 0);
        let buffer = buffer.and_then(|index| self.buffers.get_mut(index)?.take());
        buffer
            .map(|_| ())
            .ok_or_else(|| format!("no buffer is at {address:#x}"))
    }

    /// Forgets what the last launch did.
    pub(super) fn end_launch(&mut self) {
        for (number, start, end) in self.marked.drain(..) {
            if let Some(buffer) = &mut self.buffers[number] {
                buffer.marks[start..end]
                    .iter_mut()
                    .for_each(|mark| *mark &= WRITTEN);
            }
        }
    }

    fn find(&mut self, address: u64, size: usize) -> Result<Found<'_>> {
        let (number, start) = ((address >> 32) as usize, (address & 0xFFFF_FFFF) as usize);
        let buffer = number
            .checked_sub(1)
            .and_then(|index| self.buffers.get_mut(index)?.as_mut());
        let buffer = buffer.ok_or_else(|| format!("no buffer is at {address:#x}"))?;
        let end = start + size;
        if end > buffer.bytes.len() {
            let length = buffer.bytes.len();
            return Err(format!("bytes {start}..{end} of a buffer of {length}"));
        }
        Ok(Found {
            bytes: &mut buffer.bytes[start..end],
            marks: &mut buffer.marks[start..end],
            marked: &mut self.marked,
            place: (number - 1, start),
        })
    }

    /// Reads as a kernel does, by `ld.global.nc` or without `.nc`. Errors if there is no such memory, nobody wrote it, or it is not
    /// constant.
    pub fn read(&mut self, address: u64, to: &mut [u8], constant: bool) -> Result<()> {
        let poisoned = self.poisoned;
        let mut found = self.find(address, to.len())?;
        if !poisoned && found.marks.iter().any(|mark| mark & WRITTEN == 0) {
            return Err(format!(
                "{address:#x} in global memory is read, and nobody wrote it"
            ));
        }
        if constant {
            if found.marks.iter().any(|mark| mark & WRITTEN_NOW != 0) {
                return Err(format!(
                    "{address:#x} is read by .nc, and this launch writes it"
                ));
            }
            found.mark(READ_AS_CONSTANT);
        }
        to.copy_from_slice(found.bytes);
        Ok(())
    }

    /// Writes. Errors if there is no such memory, or this launch read it as constant.
    pub fn write(&mut self, address: u64, from: &[u8]) -> Result<()> {
        let mut found = self.find(address, from.len())?;
        if found.marks.iter().any(|mark| mark & READ_AS_CONSTANT != 0) {
            return Err(format!(
                "{address:#x} is written, and this launch reads it by .nc"
            ));
        }
        found.mark(WRITTEN | WRITTEN_NOW);
        found.bytes.copy_from_slice(from);
        Ok(())
    }

    /// A copy for the host. It may contain unwritten bytes. Errors if there is no such memory.
    pub fn copy(&mut self, address: u64, size: usize) -> Result<Vec<u8>> {
        self.find(address, size).map(|found| found.bytes.to_vec())
    }

    /// Writes from the host. The rest of the last word of 4 bytes counts as written too, because kernels read whole words, of which
    /// they may not use all. Errors if there is no such memory.
    pub fn write_from_host(&mut self, address: u64, from: &[u8]) -> Result<()> {
        self.end_launch();
        self.write(address, from)?;
        let end = address + from.len() as u64;
        let rest = (end.next_multiple_of(4) - end) as usize;
        if let Ok(found) = self.find(end, rest) {
            found.marks.iter_mut().for_each(|mark| *mark |= WRITTEN);
        }
        Ok(())
    }
}
