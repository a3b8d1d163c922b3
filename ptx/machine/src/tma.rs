//! `cp.async.bulk.tensor`: tiles from global to shared memory by the tensor memory accelerator.

use super::{
    Result,
    access::{Author, Heard, Writer},
    block::{Block, WARP},
    cluster::Message,
    convert::within,
    decode::{Operands, Place, Value},
    thread::PARAMETER_WINDOW,
};

/// The arguments of `cuTensorMapEncodeTiled`: dimensions from the innermost on, and zeros for everything outside.
#[derive(Clone, Debug)]
pub struct TensorMap {
    /// Where the tensor starts in global memory.
    pub address: u64,
    /// The bytes of an element.
    pub element: usize,
    /// Its dimensions, up to five.
    pub sizes: Vec<u64>,
    /// The distances between neighbors of all dimensions but the innermost, in bytes.
    pub pitches: Vec<u64>,
    /// The tile.
    pub tile: Vec<u32>,
    /// The bytes of a row of the swizzle: 32, 64 or 128, or 0 for none.
    pub swizzle: u64,
}

impl TensorMap {
    /// Checks what `cuTensorMapEncodeTiled` requires.
    pub fn check(&self) -> Result<()> {
        let rank = self.sizes.len();
        let ranks =
            (1..=5).contains(&rank) && self.pitches.len() + 1 == rank && self.tile.len() == rank;
        let pitch = |pitch: &u64| pitch.is_multiple_of(16) && *pitch < 1 << 40;
        let aligned = self.address.is_multiple_of(16) && self.pitches.iter().all(pitch);
        let sizes = self.sizes.iter().all(|size| (1..=1 << 32).contains(size));
        let tile = self.tile.iter().all(|size| (1..=256).contains(size));
        // A row of a tile has at most the bytes of the swizzle.
        let row = if ranks { self.row() } else { 0 };
        let row = row.is_multiple_of(16) && (self.swizzle == 0 || row <= self.swizzle);
        // Dimensions do not overlap.
        let width = self
            .sizes
            .first()
            .map_or(0, |size| size * self.element as u64);
        let apart = self.pitches.first().is_none_or(|pitch| *pitch >= width);
        match ranks && aligned && sizes && tile && row && apart {
            true => Ok(()),
            false => Err(format!("cuTensorMapEncodeTiled refuses {self:?}")),
        }
    }

    /// The bytes of a row of the tile.
    fn row(&self) -> u64 {
        u64::from(self.tile[0]) * self.element as u64
    }

    /// The bytes of the tile.
    fn bytes(&self) -> usize {
        self.tile.iter().product::<u32>() as usize * self.element
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
    first: [i32; 5],
    to: u64,
    barrier: u64,
}

impl Loads {
    pub(super) fn any(&self) -> bool {
        !self.0.is_empty()
    }
}

pub(super) fn decode(opcode: &str, operands: &Operands) -> Option<Load> {
    let (rank, kind) = opcode
        .strip_prefix("cp.async.bulk.tensor.")?
        .split_once("d.shared::cluster.global.tile.mbarrier::complete_tx::bytes")?;
    let blocks = match kind {
        "" => None,
        ".multicast::cluster" => Some(operands.value(3)),
        _ => return None,
    };
    let (map, coordinates) = operands.tensor(1);
    assert_eq!(Ok(coordinates.len()), rank.parse(), "{}", operands.text());
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
        let swizzle = self.maps[map].swizzle;
        if self.maps[map].sizes.len() != load.coordinates.len() {
            return Err("the tensor has another rank".into());
        }
        let to = self.address(thread, &load.to)?;
        let barrier = self.address(thread, &load.barrier)?;
        let mut first = [0; 5];
        for (first, value) in first.iter_mut().zip(&load.coordinates) {
            *first = self.value(thread, *value)? as u32 as i32;
        }
        // The swizzle repeats every 8 rows. Tiles that begin elsewhere would be legal, but would be read differently.
        if !to.is_multiple_of((8 * swizzle).max(128)) {
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
        let bytes = self.maps[tile.map].bytes();
        self.shared.announce(tile.to, bytes, author, true)?;
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
        let (row, element) = (map.row(), map.element as u64);
        let rows = map.tile[1..].iter().product::<u32>();
        for number in 0..rows {
            // Where the row is: along each dimension but the innermost, and from the tensor's start.
            let (mut rest, mut inside, mut start) = (number, true, 0);
            for dimension in 1..map.tile.len() {
                let along =
                    i64::from(tile.first[dimension]) + i64::from(rest % map.tile[dimension]);
                rest /= map.tile[dimension];
                inside &= along >= 0 && (along as u64) < map.sizes[dimension];
                start += along * map.pitches[dimension - 1] as i64;
            }
            for chunk in 0..row / 16 {
                let mut bytes = [0; 16];
                for (index, piece) in bytes.chunks_exact_mut(map.element).enumerate() {
                    let column =
                        i64::from(tile.first[0]) + (16 * chunk / element) as i64 + index as i64;
                    if inside && column >= 0 && (column as u64) < map.sizes[0] {
                        let offset = start + column * element as i64;
                        let address = map.address.wrapping_add_signed(offset);
                        self.global.borrow_mut().read(address, piece, false)?;
                    }
                }
                let place = tile.to + u64::from(number) * row + 16 * chunk;
                self.shared
                    .land(swizzled_by(map.swizzle, place), &bytes, writer)?;
            }
        }
        self.complete_bytes(barrier, map.bytes())
    }
}

/// A swizzle by its row's bytes: in an address, the number of the 16-byte chunk in the row is combined with that of the row of 128
/// bytes by exclusive or.
fn swizzled_by(row: u64, address: u64) -> u64 {
    match row {
        0 => address,
        _ => address ^ (address >> 7 & (row / 16 - 1)) << 4,
    }
}

/// The 128-byte swizzle.
pub(super) fn swizzled(address: u64) -> u64 {
    swizzled_by(128, address)
}
