// Says of each packet on its standard input why the codec refuses it, or writes it again: two texts for each.
#include "codec_telling.h"

int main() {
  Packet packet;
  while (packet.read(stdin)) {
    const Told told = packet.told();
    put(told.refused);
    put(told.again);
  }
  return 0;
}
