//! Global memory: buffers at addresses that are far apart.

use super::Result;

/// The byte was written at some time.
const WRITTEN: u8 = 1;
/// This launch wrote the byte.
const WRITTEN_NOW: u8 = 2;
/// This launch read the byte by `ld.global.nc`, so it must not be written.
const READ_AS_CONSTANT: u8 = 4;

#[derive(Debug, Default)]
pub(crate) struct Global {
    buffers: Vec<Buffer>,
}

#[derive(Debug)]
struct Buffer {
    bytes: Vec<u8>,
    marks: Vec<u8>,
}

impl Global {
    /// The address of a new buffer. Its bytes count as unwritten.
    pub(crate) fn allocate(&mut self, size: usize) -> u64 {
        self.buffers.push(Buffer {
            bytes: vec![0xCD; size],
            marks: vec![0; size],
        });
        (self.buffers.len() as u64) << 32
    }

    pub(super) fn begin_launch(&mut self) {
        for mark in self.buffers.iter_mut().flat_map(|buffer| &mut buffer.marks) {
            *mark &= WRITTEN;
        }
    }

    fn find(&mut self, address: u64, size: usize) -> Result<(&mut [u8], &mut [u8])> {
        let (number, start) = ((address >> 32) as usize, (address & 0xFFFF_FFFF) as usize);
        let buffer = number
            .checked_sub(1)
            .and_then(|index| self.buffers.get_mut(index));
        let buffer = buffer.ok_or_else(|| format!("no buffer is at {address:#x}"))?;
        let end = start + size;
        if end > buffer.bytes.len() {
            let length = buffer.bytes.len();
            return Err(format!("bytes {start}..{end} of a buffer of {length}"));
        }
        Ok((&mut buffer.bytes[start..end], &mut buffer.marks[start..end]))
    }

    pub(crate) fn read(&mut self, address: u64, to: &mut [u8], constant: bool) -> Result<()> {
        let (bytes, marks) = self.find(address, to.len())?;
        if marks.iter().any(|mark| mark & WRITTEN == 0) {
            return Err(format!(
                "{address:#x} in global memory is read, and nobody wrote it"
            ));
        }
        if constant {
            if marks.iter().any(|mark| mark & WRITTEN_NOW != 0) {
                return Err(format!(
                    "{address:#x} is read by .nc, and this launch writes it"
                ));
            }
            marks.iter_mut().for_each(|mark| *mark |= READ_AS_CONSTANT);
        }
        to.copy_from_slice(bytes);
        Ok(())
    }

    pub(crate) fn write(&mut self, address: u64, from: &[u8]) -> Result<()> {
        let (bytes, marks) = self.find(address, from.len())?;
        if marks.iter().any(|mark| mark & READ_AS_CONSTANT != 0) {
            return Err(format!(
                "{address:#x} is written, and this launch reads it by .nc"
            ));
        }
        marks
            .iter_mut()
            .for_each(|mark| *mark |= WRITTEN | WRITTEN_NOW);
        bytes.copy_from_slice(from);
        Ok(())
    }

    /// A copy of a buffer for the host. It may contain unwritten bytes.
    pub(crate) fn copy(&mut self, address: u64, size: usize) -> Result<Vec<u8>> {
        self.find(address, size).map(|(bytes, _)| bytes.to_vec())
    }
}
