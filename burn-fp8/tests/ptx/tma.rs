//! `cp.async.bulk.tensor`: tiles from global to shared memory by the tensor memory accelerator.

use super::{
    Result,
    block::{Block, WARP},
    cluster::Message,
    convert::within,
    decode::{Operands, Place, Value},
    shared::{Author, Heard, Writer},
    thread::PARAMETER_WINDOW,
};

/// The arguments of `cuTensorMapEncodeTiled` for a tensor of bytes: dimensions from the innermost on, with the 128-byte swizzle,
/// and zeros for everything outside.
#[derive(Clone, Debug)]
pub(crate) struct TensorMap {
    pub(crate) address: u64,
    pub(crate) sizes: [u64; 2],
    /// The distance between rows, in bytes.
    pub(crate) pitch: u64,
    /// The tile.
    pub(crate) tile: [u32; 2],
}

impl TensorMap {
    /// Checks what `cuTensorMapEncodeTiled` requires.
    pub(super) fn check(&self) -> Result<()> {
        let aligned = self.address.is_multiple_of(16) && self.pitch.is_multiple_of(16);
        let sizes = self.sizes.iter().all(|size| (1..=1 << 32).contains(size));
        let tile = self.tile.iter().all(|size| (1..=256).contains(size));
        // A row of a tile has at most the 128 bytes of the swizzle.
        let row = self.tile[0].is_multiple_of(16) && self.tile[0] <= 128;
        match aligned && sizes && tile && row && self.pitch < 1 << 40 && self.pitch >= self.sizes[0]
        {
            true => Ok(()),
            false => Err(format!("cuTensorMapEncodeTiled refuses {self:?}")),
        }
    }
}

/// `[to], [map, {column, row}], [barrier]`, and for multicast the blocks of the cluster that receive the tile, as bits.
pub(super) struct Load {
    to: Place,
    map: Place,
    coordinates: Vec<Value>,
    barrier: Place,
    blocks: Option<Value>,
}

/// The tiles in flight, with the phases of their barriers that they count for.
#[derive(Debug, Default)]
pub(super) struct Loads(Vec<(Tile, u32)>);

#[derive(Clone, Copy, Debug)]
pub(super) struct Tile {
    map: usize,
    /// The first element, innermost dimension first.
    first: [i32; 2],
    to: u64,
    barrier: u64,
}

impl Loads {
    pub(super) fn any(&self) -> bool {
        !self.0.is_empty()
    }
}

pub(super) fn decode(opcode: &str, operands: &Operands) -> Option<Load> {
    let kind = opcode.strip_prefix(
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes",
    )?;
    let blocks = match kind {
        "" => None,
        ".multicast::cluster" => Some(operands.value(3)),
        _ => return None,
    };
    let (map, coordinates) = operands.tensor(1);
    assert_eq!(coordinates.len(), 2, "{}", operands.text());
    Some(Load {
        to: operands.place(0),
        map,
        coordinates,
        barrier: operands.place(2),
        blocks,
    })
}

impl Block<'_> {
    pub(super) fn tma_load(&mut self, thread: usize, load: &Load) -> Result<()> {
        let map = self.address(thread, &load.map)?;
        let map = within(PARAMETER_WINDOW, map).ok_or("the tensor map is no parameter")? as usize;
        let number = self
            .parameters
            .get(map..map + 8)
            .filter(|_| map.is_multiple_of(64));
        let number = number.ok_or("no tensor map is there")?.try_into().unwrap();
        let number = (u64::from_le_bytes(number) as usize).checked_sub(1);
        let number = number.filter(|number| *number < self.maps.len());
        let map = number.ok_or("the parameter is no tensor map")?;
        let to = self.address(thread, &load.to)?;
        let barrier = self.address(thread, &load.barrier)?;
        let mut first = [0; 2];
        for (first, value) in first.iter_mut().zip(&load.coordinates) {
            *first = self.value(thread, *value)? as u32 as i32;
        }
        // The swizzle repeats every 1024 bytes. Tiles that begin elsewhere would be legal, but would be read differently.
        if !to.is_multiple_of(1024) {
            return Err(format!("a tile at {to:#x}"));
        }
        let tile = Tile {
            map,
            first,
            to,
            barrier,
        };
        let warp = self.first_warp + thread / WARP;
        let heard = self.threads[thread].heard.clone();
        let blocks = match load.blocks {
            Some(blocks) => self.value(thread, blocks)?,
            None => 1 << self.number,
        };
        for number in (0..u64::BITS as usize).filter(|number| blocks >> number & 1 == 1) {
            if number == self.number {
                let phase = self.phase_for_tma(barrier, thread)?;
                let author = Author {
                    thread,
                    warp,
                    heard: &heard,
                };
                self.announce_tile(tile, phase, &author)?;
            } else {
                let heard = heard.clone();
                self.tell(number, Message::Load { tile, warp, heard });
            }
        }
        Ok(())
    }

    /// A tile that another block of the cluster, by a thread that has heard so much, requests for this one.
    pub(super) fn load_from_afar(&mut self, tile: Tile, warp: usize, heard: &Heard) -> Result<()> {
        self.check_published(tile.barrier)?;
        let thread = usize::MAX;
        let phase = self.phase_for_tma(tile.barrier, thread)?;
        let author = Author {
            thread,
            warp,
            heard,
        };
        self.announce_tile(tile, phase, &author)
    }

    fn announce_tile(&mut self, tile: Tile, phase: u32, author: &Author) -> Result<()> {
        let bytes = self.maps[tile.map].tile.iter().product::<u32>() as usize;
        let start = self.shared.index(tile.to, bytes / 4)?;
        for word in start..start + bytes / 4 {
            self.shared.announce(word, author, true)?;
        }
        self.loads.0.push((tile, phase));
        Ok(())
    }

    /// Delivers one of the tiles that a barrier waits for: the last one requested, because no order is promised.
    pub(super) fn arrive_one(&mut self, barrier: u64) -> Result<()> {
        let Some(index) = self
            .loads
            .0
            .iter()
            .rposition(|(tile, _)| tile.barrier == barrier)
        else {
            return Ok(());
        };
        let (tile, phase) = self.loads.0.remove(index);
        let map = self.maps[tile.map].clone();
        let writer = Writer::Tma { barrier, phase };
        let [width, height] = map.tile;
        for row in 0..height {
            let line = i64::from(tile.first[1]) + i64::from(row);
            for chunk in 0..width / 16 {
                let mut bytes = [0; 16];
                for (index, byte) in bytes.iter_mut().enumerate() {
                    let column = i64::from(tile.first[0]) + i64::from(16 * chunk) + index as i64;
                    let inside = |place: i64, size: u64| place >= 0 && (place as u64) < size;
                    if inside(line, map.sizes[1]) && inside(column, map.sizes[0]) {
                        let address = map.address + line as u64 * map.pitch + column as u64;
                        self.global.borrow_mut().read(
                            address,
                            std::slice::from_mut(byte),
                            false,
                        )?;
                    }
                }
                let place = tile.to + u64::from(row * width + 16 * chunk);
                let start = self.shared.index(swizzled(place), 4)?;
                for (index, word) in bytes.chunks_exact(4).enumerate() {
                    let value = u32::from_le_bytes(word.try_into().unwrap());
                    self.shared.land(start + index, value, writer);
                }
            }
        }
        self.complete_bytes(barrier, (width * height) as usize)
    }
}

/// The 128-byte swizzle: in an address, the number of the 16-byte chunk (bits 4 to 6) is combined with that of the row of 128
/// bytes (bits 7 to 9) by exclusive or.
pub(super) fn swizzled(address: u64) -> u64 {
    address ^ (address >> 7 & 7) << 4
}
