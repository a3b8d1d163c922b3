//! Copies the output of a rank, either as it comes, or line by line with the rank's number before each. A carriage return,
//! with which progress bars begin anew, also ends a line.

use std::{
    io::{self, BufRead, BufReader, Read, Write},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

/// How long a pipe may be silent after the ranks have ended. A process that left its group may hold a pipe open
/// forever.
const SILENCE: Duration = Duration::from_secs(1);
/// The largest number of bytes that a pipe can hold when the ranks have ended. Later bytes are not from the ranks.
const PIPE: u64 = 1 << 20;

/// How long a message is waited for.
const SAYING: Duration = Duration::from_millis(100);

/// Says something on stderr. Not logged, because the `burn-ddp` command has no logger. Whoever reads stderr may close it, or not read
/// on, which must not keep the launcher from its ranks.
pub(super) fn say(what: &str) {
    let line = format!("burn-ddp: {what}\n");
    let start = Instant::now();
    let saying = thread::spawn(move || io::stderr().write_all(line.as_bytes()));
    while !saying.is_finished() && start.elapsed() < SAYING {
        thread::sleep(Duration::from_millis(1));
    }
}

/// One pipe of a rank, and the thread that copies it.
pub(super) struct Output {
    thread: JoinHandle<()>,
    read: Arc<AtomicU64>,
    written: Arc<AtomicU64>,
}

impl Output {
    /// Starts to copy `output` to `sink`. If `rank` is given, it is put before each line.
    pub(super) fn copy(
        rank: Option<usize>,
        output: impl Read + Send + 'static,
        sink: impl Fn() -> Box<dyn Write> + Send + 'static,
    ) -> Self {
        let (read, written) = (Arc::<AtomicU64>::default(), Arc::<AtomicU64>::default());
        let counts = (read.clone(), written.clone());
        let thread = thread::spawn(move || {
            let mut from = BufReader::new(output);
            let mut piece = Vec::new();
            // Whether the last line ended with a carriage return.
            let mut returned = false;
            while let Ok(bytes @ 1..) = read_piece(&mut from, &mut piece, rank.is_some()) {
                counts.0.fetch_add(bytes as u64, Ordering::SeqCst);
                if let Some(rank) = rank {
                    piece = numbered(rank, &piece, returned);
                    returned = piece.last() == Some(&b'\r');
                }
                let mut sink = sink();
                let written = sink.write_all(&piece);
                // Stdout buffers text that does not end a line, such as the state of a progress bar. Errors are ignored:
                // whoever reads the output may close it.
                let _ = written.and_then(|()| sink.flush());
                piece.clear();
                counts.1.fetch_add(bytes as u64, Ordering::SeqCst);
            }
        });
        Self {
            thread,
            read,
            written,
        }
    }

    /// What to poll for the rest of the output, after the ranks have ended.
    pub(super) fn finish(self) -> Rest {
        let written = self.written.load(Ordering::SeqCst);
        Rest {
            output: self,
            written,
            end: written + PIPE,
            heard: Instant::now(),
        }
    }
}

/// The line with the rank's number before it. A newline right after a carriage return (`returned`) ends that line, and
/// gets no number.
fn numbered(rank: usize, line: &[u8], returned: bool) -> Vec<u8> {
    let mut whole = match returned && line == b"\n" {
        true => Vec::new(),
        false => format!("[{rank}] ").into_bytes(),
    };
    whole.extend_from_slice(line);
    if !matches!(line.last(), Some(b'\r' | b'\n')) {
        whole.push(b'\n');
    }
    whole
}

/// Reads the bytes that are available or, if `line`, up to a newline or carriage return. Returns the number of bytes.
fn read_piece(from: &mut impl BufRead, into: &mut Vec<u8>, line: bool) -> io::Result<usize> {
    let mut read = 0;
    loop {
        let there = match from.fill_buf() {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            there => there?,
        };
        let is_end = |byte: &u8| line && matches!(byte, b'\n' | b'\r');
        let end = there.iter().position(is_end);
        let taken = end.map_or(there.len(), |end| end + 1);
        into.extend_from_slice(&there[..taken]);
        let is_over = taken == 0 || end.is_some() || !line;
        from.consume(taken);
        read += taken;
        if is_over {
            return Ok(read);
        }
    }
}

/// The output that is left in a pipe.
pub(super) struct Rest {
    output: Output,
    /// The bytes written by the last call of [`is_coming`](Self::is_coming).
    written: u64,
    end: u64,
    heard: Instant,
}

impl Rest {
    /// Whether more output may come. A reader that takes a line slowly is waited for.
    pub(super) fn is_coming(&mut self) -> bool {
        let written = self.output.written.load(Ordering::SeqCst);
        let has_more = self.output.read.load(Ordering::SeqCst) > written;
        if has_more && written == self.written {
            self.heard = Instant::now();
        }
        self.written = written;
        !self.output.thread.is_finished() && written < self.end && self.heard.elapsed() < SILENCE
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::{io::LineWriter, sync::Mutex};

    /// The copied output of a rank that writes these pieces.
    fn copied(rank: Option<usize>, pieces: &[&str]) -> String {
        struct Pieces(Vec<Vec<u8>>);

        impl Read for Pieces {
            fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
                if self.0.is_empty() {
                    return Ok(0);
                }
                let piece = self.0.remove(0);
                into[..piece.len()].copy_from_slice(&piece);
                Ok(piece.len())
            }
        }

        /// A line-buffered writer, like stdout.
        #[derive(Clone)]
        struct Sink(Arc<Mutex<LineWriter<Vec<u8>>>>);

        impl Write for Sink {
            fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
                self.0.lock().unwrap().write(bytes)
            }

            fn flush(&mut self) -> io::Result<()> {
                self.0.lock().unwrap().flush()
            }
        }

        let pieces = Pieces(pieces.iter().map(|piece| (*piece).into()).collect());
        let sink = Sink(Arc::new(Mutex::new(LineWriter::new(Vec::new()))));
        let written = sink.clone();
        let output = Output::copy(rank, pieces, move || Box::new(sink.clone()));
        output.thread.join().unwrap();
        let written = written.0.lock().unwrap().get_ref().clone();
        String::from_utf8(written).unwrap()
    }

    #[test]
    fn each_line_has_the_rank_before_it() {
        let pieces = ["a\nb", "c\n\nd"];
        let lines = "[3] a\n[3] bc\n[3] \n[3] d\n";
        assert_eq!(copied(Some(3), &pieces), lines);
        assert_eq!(copied(None, &pieces), "a\nbc\n\nd");
        assert_eq!(copied(Some(3), &[]), "");
    }

    /// The line of a progress bar may take hours to end, and must not be held back until then.
    #[test]
    fn progress_bars_move() {
        let bar = ["10 %\r", "20 %\r"];
        assert_eq!(copied(Some(3), &bar), "[3] 10 %\r[3] 20 %\r");
        assert_eq!(copied(None, &bar), "10 %\r20 %\r");
        let end = ["100 %\r", "\nend\r\n"];
        assert_eq!(copied(Some(3), &end), "[3] 100 %\r\n[3] end\r\n");
        assert_eq!(copied(None, &end), "100 %\r\nend\r\n");
    }
}
